// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"archive/tar"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/adapt"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
)

// noLinks is a root file system without symbolic links.
const noLinks = "/gpuckpt-test/none"

// zoo unpacks a dump of CRIU 4.2.1 whose program has one of every kind of file, timer, mapping and
// IPC object that a restore takes, and returns its directory and its container's spec. The container
// has no capability.
func zoo(t testing.TB) (string, *specs.Spec) {
	t.Helper()
	packed, err := os.Open("testdata/zoo.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	z, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, h.Name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"core-1.img", "core-8.img", "core-9.img", "core-10.img"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			continue
		}
		f := parse(t, dir, name)
		if c := f.Entries[0].Message.(*criucore.CoreEntry).GetThreadCore().GetCreds(); c != nil {
			c.CapBnd, c.CapPrm, c.CapEff, c.CapInh, c.CapAmb = nil, nil, nil, nil, nil
		}
		write(t, f, dir)
	}
	data, err := os.ReadFile("testdata/config.json")
	if err != nil {
		t.Fatal(err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(data, spec); err != nil {
		t.Fatal(err)
	}
	if data, err = os.ReadFile("admission/internal/seccomp/testdata/containerd.json"); err == nil {
		err = json.Unmarshal(data, spec.Linux.Seccomp)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir, spec
}

func parse(t testing.TB, dir, name string) *imagetest.File {
	t.Helper()
	f, err := imagetest.Parse(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func write(t testing.TB, f *imagetest.File, dir string) {
	t.Helper()
	if err := f.Write(dir); err != nil {
		t.Fatal(err)
	}
}

// Every field of every message of a real dump is changed by every kind of value, taken away and
// repeated, and every message gets a field that nobody knows. Each change is refused, or the list of
// fields says why it is harmless. A rule that refuses no change of a field is no rule.
// TestEveryField of integration/hostile has those that are let through restored for real.
func TestEveryFieldOfAHostileImage(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector makes minutes of it: hack/test runs it without")
	}
	dir, spec := zoo(t)
	images := func() error { return Images(t.Context(), spec, criu.Open(dir), noLinks) }
	if err := images(); err != nil {
		t.Fatalf("the dump as it was: %v", err)
	}
	changes, refusals, harmless, escapes := 0, 0, 0, 0
	tried, refused, err := imagetest.Each(dir, nil, func(c imagetest.Change) bool {
		undo, err := c.Put(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = images()
		if err := undo(); err != nil {
			t.Fatal(err)
		}
		listed := image.Fields()[c.Field]
		changes++
		switch {
		case err != nil:
			refusals++
			return true
		case c.Unknown && neverRead(c.Field):
			harmless++
		case c.Unknown, listed.May == "", listed.May == image.Refused && !c.Unset:
			escapes++
			t.Errorf("%v: it is let through (%s)", c, listed.Why)
		default:
			harmless++
		}
		return false
	})
	if err != nil {
		t.Fatal(err)
	}
	var never, unseen []string
	for name, listed := range image.Fields() {
		switch {
		case tried[name] == 0:
			unseen = append(unseen, string(name))
		case name == "inventory_entry.lsmtype": // TestAttacks has a spec with a profile
		case listed.May != image.Any && listed.May != image.Dropped && refused[name] == 0:
			never = append(never, fmt.Sprintf("%s (%s %s)", name, listed.May, listed.Why))
		}
	}
	slices.Sort(never)
	slices.Sort(unseen)
	for _, name := range never {
		t.Errorf("no change of %s is refused", name)
	}
	for _, name := range unseen {
		t.Errorf("%s is never changed: there is no message of its type", name)
	}
	t.Logf("%d fields, %d changes: %d refused, %d harmless by the list, %d let through", len(image.Fields()), changes, refusals, harmless, escapes)
}

// Who looks at a dump changes nothing of it: the copy is made of the entries that all of them have read.
func TestALookChangesNothing(t *testing.T) {
	dir, spec := zoo(t)
	copied := func(images *criu.Images) map[string]string {
		to, err := images.Copy(t.Context(), t.TempDir(), 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		defer to.Close()
		names, err := os.ReadDir(to.Path())
		if err != nil {
			t.Fatal(err)
		}
		files := make(map[string]string)
		for _, n := range names {
			data, err := os.ReadFile(filepath.Join(to.Path(), n.Name()))
			if err != nil {
				t.Fatal(err)
			}
			files[n.Name()] = string(data)
		}
		return files
	}
	seen := criu.Open(dir)
	_, err := adapt.ForRestore(spec, seen.Set, criu.Settings{})
	if err == nil {
		_, err = goneNames(spec, seen, noLinks)
	}
	if err = errors.Join(err, Images(t.Context(), spec, seen, noLinks)); err != nil {
		t.Fatal(err)
	}
	if want, got := copied(criu.Open(dir)), copied(seen); len(want) == 0 || !maps.Equal(got, want) {
		t.Error("the copy is another after a look")
	}
}

// neverRead reports whether CRIU gets no message of a type.
func neverRead(message protoreflect.FullName) bool {
	for name, listed := range image.Fields() {
		if name.Parent() == message && listed.May != image.Dropped {
			return false
		}
	}
	return true
}

// What the review of security did to images, and what it read that could be done (S1 to S8): each is
// refused, by the rule that is for it. TestEachRule of integration/hostile takes the rule away.
func TestAttacks(t *testing.T) {
	for _, a := range imagetest.Attacks() {
		t.Run(a.Name, func(t *testing.T) {
			dir, spec := zoo(t)
			if err := a.Apply(dir); err != nil {
				t.Fatal(err)
			}
			err := Images(t.Context(), spec, criu.Open(dir), noLinks)
			if a.Says == "" && err != nil || a.Says != "" && (err == nil || !strings.Contains(err.Error(), a.Says)) {
				t.Errorf("got %v, want %q", err, a.Says)
			}
		})
	}
	t.Run("S5: no security module", func(t *testing.T) {
		dir, spec := zoo(t)
		spec.Process.ApparmorProfile = "unconfined-not"
		if err := Images(t.Context(), spec, criu.Open(dir), noLinks); err == nil || !strings.Contains(err.Error(), "AppArmor") {
			t.Errorf("got %v", err)
		}
	})
}
