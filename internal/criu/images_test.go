// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	"github.com/checkpoint-restore/go-criu/v8/magic"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
)

// header is the begin of an image.
func header(kind string) (b []byte) {
	magics := magic.LoadMagic().ByName
	if kind != "INVENTORY" {
		b = binary.LittleEndian.AppendUint32(b, uint32(magics["IMG_COMMON"]))
	}
	return binary.LittleEndian.AppendUint32(b, uint32(magics[kind]))
}

// imageOf writes entries as CRIU does.
func imageOf(t testing.TB, kind string, entries ...proto.Message) []byte {
	t.Helper()
	b := header(kind)
	for _, e := range entries {
		data, err := proto.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(data))), data...)
	}
	return b
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func mountOf(at, key string) *mnt.MntEntry {
	m := &mnt.MntEntry{
		Fstype: new(uint32), MntId: new(uint32), RootDev: new(uint32), ParentMntId: new(uint32), Flags: new(uint32),
		Root: new("/"), Mountpoint: &at, Source: new(""), Options: new(""),
	}
	if key != "" {
		m.ExtKey = &key
	}
	return m
}

func fileOf(name string) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{
		Type: fdinfo.FdTypes_REG.Enum(), Id: proto.Uint32(1),
		Reg: &regfile.RegFileEntry{
			Id: proto.Uint32(1), Flags: new(uint32), Pos: new(uint64), Name: &name,
			Fown: &fown.FownEntry{Uid: new(uint32), Euid: new(uint32), Signum: new(uint32), PidType: new(uint32), Pid: new(uint32)},
		},
	}
}

func TestMountsAndFiles(t *testing.T) {
	dir := t.TempDir()
	if mounts, err := Open(dir).Mounts(); err != nil || mounts != nil {
		t.Errorf("an empty directory: %v, %v", mounts, err)
	}
	if files, err := Open(dir).Files(); err != nil || files != nil {
		t.Errorf("an empty directory: %v, %v", files, err)
	}
	write := func(name string, data []byte) {
		t.Helper()
		writeFile(t, filepath.Join(dir, name), string(data))
	}
	write("mountpoints-12.img", imageOf(t, "MNTS", mountOf("/", ""), mountOf("/dev/nvidia0", "/dev/nvidia0"), mountOf("/lib", "/usr/lib/libcuda.so.1")))
	write("mountpoints-13.img", imageOf(t, "MNTS", mountOf("/x", "/dev/nvidia0")))
	write("files.img", imageOf(t, "FILES", fileOf("/usr/lib/libc.so.6"), fileOf("/usr/lib/libc.so.6"), fileOf("/x")))
	im := Open(dir)
	mounts, err := im.Mounts()
	if want := []string{"/dev/nvidia0", "/usr/lib/libcuda.so.1"}; err != nil || !slices.Equal(mounts, want) {
		t.Errorf("mounts %v, error %v; want %v", mounts, err, want)
	}
	files, err := im.Files()
	if want := []string{"/usr/lib/libc.so.6", "/x"}; err != nil || !slices.Equal(files, want) {
		t.Errorf("files %v, error %v; want %v", files, err, want)
	}

	write("files.img", []byte{1, 2, 3})
	if files, err := Open(dir).Files(); !errors.Is(err, images.ErrDamaged) || len(files) > 0 {
		t.Errorf("%v, error %v; want images.ErrDamaged", files, err)
	}
	if err := os.Remove(filepath.Join(dir, "files.img")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "files.img"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir).Files(); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("a directory: error %v, want images.ErrDamaged", err)
	}
}

// A dump has no more mounts than a kernel.
func TestMountsAreBounded(t *testing.T) {
	dir := t.TempDir()
	entry := imageOf(t, "MNTS", mountOf("/", ""))[8:]
	writeFile(t, filepath.Join(dir, "mountpoints-1.img"), string(append(header("MNTS"), bytes.Repeat(entry, maxMounts+1)...)))
	if _, err := Open(dir).Mounts(); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "mounts") {
		t.Errorf("got %v", err)
	}
}
