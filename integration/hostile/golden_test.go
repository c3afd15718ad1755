// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
)

// golden is the directory of the dump that the tests and the fuzz targets of package guard change.
const golden = "../../internal/guard/testdata"

// shadowStack is what a thread has on processors with shadow stacks alone.
const shadowStack = "user_x86_cet_entry"

var write = flag.Bool("write", false, "make the dump anew that the tests of package guard change")

// The dump that the tests of package guard change is one of this program, with one of everything that it has.
func TestGolden(t *testing.T) {
	z := newZoo(t, checking)
	if *write {
		writeGolden(t, z)
	}
	dir := t.TempDir()
	packed, err := os.Open(filepath.Join(golden, "zoo.tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	plain, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(plain); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		var data []byte
		if err == nil {
			data, err = io.ReadAll(r)
		}
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, h.Name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	processor, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		t.Fatal(err)
	}
	is, want := animals(t, dir), animals(t, z.dir)
	for name := range want {
		if !is[name] {
			t.Errorf("it lacks %s: go -C integration test ./hostile -run TestGolden -args -write", name)
		}
		delete(is, name)
	}
	for name := range is {
		if name == shadowStack && !slices.Contains(strings.Fields(string(processor)), "user_shstk") {
			continue
		}
		t.Errorf("it has %s, which the program lacks", name)
	}
	t.Logf("%d kinds of images, messages and files", len(want))
}

// animals are what a dump has: kinds of images, types of messages and names of files, without numbers.
func animals(t *testing.T, dir string) map[string]bool {
	t.Helper()
	all := make(map[string]bool)
	names, err := image.Open(dir).Names()
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if image.KindOf(name).Magic == "" {
			continue
		}
		all[image.KindOf(name).Magic] = true
		f, err := imagetest.Parse(dir, name)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range f.Entries {
			imagetest.EachMessage(e.Message, func(name protoreflect.FullName) { all[string(name)] = true })
			if f, ok := e.Message.(*fdinfo.FileEntry); ok && f.Reg != nil {
				all["the file "+numbers.ReplaceAllString(f.Reg.GetName(), "N")] = true
			}
		}
	}
	return all
}

// writeGolden packs a dump for the tests of package guard, with its container's spec. Content of memory is left out, and
// what is of this machine.
func writeGolden(t *testing.T, z *zoo) {
	t.Helper()
	const source = "/srv/zoo" // instead of outside
	names, err := image.Open(z.dir).Names()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	copyFiles(t, z.dir, dir)
	f, err := os.Create(filepath.Join(golden, "zoo.tar.gz"))
	if err != nil {
		t.Fatal(err)
	}
	packed := gzip.NewWriter(f)
	w := tar.NewWriter(packed)
	for _, name := range names {
		if strings.HasPrefix(name, "gpuckpt") || strings.HasPrefix(name, "stats-") || strings.HasSuffix(name, ".log") {
			continue
		}
		if strings.HasPrefix(name, "mountpoints-") {
			f, err := imagetest.Parse(dir, name)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range f.Entries {
				if m := e.Message.(*mnt.MntEntry); strings.HasSuffix(outside, m.GetRoot()) && m.GetRoot() != "/" {
					m.Root = new(source)
				}
			}
			if err := f.Write(dir); err != nil {
				t.Fatal(err)
			}
		}
		var data []byte
		if !strings.HasPrefix(name, "pages-") {
			if data, err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: 0o600, Size: int64(len(data))})
		if err == nil {
			_, err = w.Write(data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	spec := &specs.Spec{
		Version: z.spec.Version, Process: z.spec.Process, Root: &specs.Root{Path: "rootfs"}, Mounts: slices.Clone(z.spec.Mounts),
		Linux: &specs.Linux{
			CgroupsPath: z.spec.Linux.CgroupsPath, Namespaces: slices.Clone(z.spec.Linux.Namespaces), MaskedPaths: z.spec.Linux.MaskedPaths, ReadonlyPaths: z.spec.Linux.ReadonlyPaths,
			Seccomp: &specs.LinuxSeccomp{DefaultAction: z.spec.Linux.Seccomp.DefaultAction}, // the test has the profile
		},
	}
	for i := range spec.Mounts {
		if spec.Mounts[i].Source == outside {
			spec.Mounts[i].Source = source
		}
	}
	for i := range spec.Linux.Namespaces {
		spec.Linux.Namespaces[i].Path = ""
	}
	text, err := json.MarshalIndent(spec, "", " ")
	if err == nil {
		err = os.WriteFile(filepath.Join(golden, "config.json"), append(text, '\n'), 0o644)
	}
	if err = errors.Join(err, w.Close(), packed.Close(), f.Close()); err != nil {
		t.Fatal(err)
	}
}
