// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	ipcdesc "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-desc"
	ipcmsg "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-msg"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	pipedata "github.com/checkpoint-restore/go-criu/v8/crit/images/pipe-data"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	"github.com/checkpoint-restore/go-criu/v8/magic"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

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

// entry is an entry behind its length.
func entry(t testing.TB, m proto.Message) []byte {
	t.Helper()
	data, err := (proto.MarshalOptions{Deterministic: true}).Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.LittleEndian.AppendUint32(nil, uint32(len(data))), data...)
}

// imageOf writes entries as CRIU does.
func imageOf(t testing.TB, kind string, messages ...proto.Message) []byte {
	t.Helper()
	b := header(kind)
	for _, m := range messages {
		b = append(b, entry(t, m)...)
	}
	return b
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

func put1(t testing.TB, dir, name string, data []byte) {
	t.Helper()
	if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
		t.Fatal(err)
	}
}

// copied copies a directory and returns what CRIU would read, by name.
func copied(t testing.TB, dir string, edit func(*Entry) error) (map[string]string, error) {
	t.Helper()
	to, err := NewDir(0)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := Open(dir).Copy(t.Context(), to, edit); err != nil {
		return nil, err
	}
	if err := to.Seal(); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(to.Path())
	if err != nil {
		t.Fatal(err)
	}
	files := make(map[string]string)
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(to.Path(), e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = string(data)
	}
	return files, nil
}

// queue is an image with two message queues of System V.
func queue(t testing.TB) []byte {
	desc := &ipcdesc.IpcDescEntry{Key: new(uint32), Uid: new(uint32), Gid: new(uint32), Cuid: new(uint32), Cgid: new(uint32), Mode: new(uint32), Id: new(uint32)}
	b := imageOf(t, "IPCNS_MSG", &ipcmsg.IpcMsgEntry{Desc: desc, Qbytes: new(uint32), Qnum: proto.Uint32(2)})
	for _, text := range []string{"9 bytes  ", ""} {
		b = append(b, entry(t, &ipcmsg.IpcMsg{Mtype: proto.Uint64(1), Msize: new(uint32(len(text)))})...)
		b = append(b, text...)
		b = append(b, make([]byte, int(roundUp(int64(len(text)), 8))-len(text))...)
	}
	return append(b, entry(t, &ipcmsg.IpcMsgEntry{Desc: desc, Qbytes: new(uint32), Qnum: new(uint32)})...)
}

// goodDir has an image of each layout.
func goodDir(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	ghost := &ghostfile.GhostFileEntry{Uid: new(uint32), Gid: new(uint32), Mode: proto.Uint32(0o100600)}
	parts := proto.CloneOf(ghost)
	parts.Chunks, parts.Size = new(true), proto.Uint64(10)
	data := &pipedata.PipeDataEntry{PipeId: new(uint32), Bytes: proto.Uint32(3)}
	for name, content := range map[string][]byte{
		"fs-1.img":  imageOf(t, "FS", &fs.FsEntry{CwdId: new(uint32), RootId: new(uint32)}),
		"files.img": imageOf(t, "FILES", fileOf("/a"), fileOf("/b")),
		"pagemap-1.img": imageOf(t, "PAGEMAP", &pagemap.PagemapHead{PagesId: proto.Uint32(1)},
			&pagemap.PagemapEntry{Vaddr: proto.Uint64(4096), CompatNrPages: proto.Uint32(1)}, &pagemap.PagemapEntry{Vaddr: proto.Uint64(8192), CompatNrPages: proto.Uint32(2)}),
		"pages-1.img":       []byte("memory"),
		"ipcns-msg-1.img":   queue(t),
		"ghost-file-1.img":  append(imageOf(t, "GHOST_FILE", ghost), "content of the file"...),
		"ghost-file-a1.img": append(imageOf(t, "GHOST_FILE", parts, &ghostfile.GhostChunkEntry{Len: proto.Uint64(4), Off: proto.Uint64(6)}), "part"...),
		"pipes-data.img":    append(append(append(imageOf(t, "PIPES_DATA", data), "abc"...), entry(t, data)...), "def"...),
		"descriptors.json":  []byte(`["/dev/null","pipe:[123]","socket:[4]"]`),
		"gpuckpt-files.txt": []byte("31\t2\t/dev/nvidia0\n"),
		images.MetadataName: []byte("{}"),
		"gpu-1-0":           []byte("state"),
	} {
		put1(t, dir, name, content)
	}
	return dir
}

func TestCopy(t *testing.T) {
	dir := goodDir(t)
	got, err := copied(t, dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range got {
		want, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		if name == "descriptors.json" {
			want = []byte(`["","pipe:[123]",""]`)
		}
		if text != string(want) {
			t.Errorf("%s: %q, want %q", name, text, want)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if _, ok := got[e.Name()]; ok == (e.Name() == images.MetadataName || e.Name() == "gpu-1-0") {
			t.Errorf("%s: copied: %v", e.Name(), ok)
		}
	}
}

// An edit may change entries and leave entries out, but not by a value that is not allowed, and
// not the size of what follows.
func TestEdit(t *testing.T) {
	dir := goodDir(t)
	got, err := copied(t, dir, func(e *Entry) error {
		switch m := e.Message.(type) {
		case *fdinfo.FileEntry:
			if m.GetReg().GetName() == "/a" {
				return ErrOmit
			}
			m.Reg.Pos = proto.Uint64(77)
		case *pipedata.PipeDataEntry:
			if e.N == 0 {
				return ErrOmit
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	left := fileOf("/b")
	left.Reg.Pos = proto.Uint64(77)
	if want := string(imageOf(t, "FILES", left)); got["files.img"] != want {
		t.Errorf("files.img: %q, want %q", got["files.img"], want)
	}
	if text := got["pipes-data.img"]; strings.Contains(text, "abc") || !strings.HasSuffix(text, "def") {
		t.Errorf("pipes-data.img: %q", text)
	}
	for name, edit := range map[string]func(*Entry) error{
		"size of the data": func(e *Entry) error {
			if m, ok := e.Message.(*pipedata.PipeDataEntry); ok {
				m.Bytes = proto.Uint32(2)
			}
			return nil
		},
		"not allowed": func(e *Entry) error {
			if m, ok := e.Message.(*fdinfo.FileEntry); ok {
				m.Reg.Ext = new(true)
			}
			return nil
		},
		"an error of its own": func(e *Entry) error { return e.Errorf("no") },
	} {
		if _, err := copied(t, dir, edit); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

// What is not known or not whole is refused, by name.
func TestRefused(t *testing.T) {
	good := imageOf(t, "FILES", fileOf("/"))
	nul := imageOf(t, "FILES", fileOf("/etc\x00/x"))
	unknown := protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 1)
	with := func(more ...byte) []byte {
		m := fileOf("/")
		m.Reg.ProtoReflect().SetUnknown(more)
		return imageOf(t, "FILES", m)
	}
	desc := &ipcdesc.IpcDescEntry{Key: new(uint32), Uid: new(uint32), Gid: new(uint32), Cuid: new(uint32), Cgid: new(uint32), Mode: new(uint32), Id: new(uint32)}
	enumeration := append(entry(t, fileOf("/"))[4:], 8, 200, 1) // a type of files that there is not
	for name, c := range map[string]struct {
		file, says string
		data       []byte
		damaged    bool
	}{
		"a file":             {"netlinksk.img", "netlinksk.img", nil, false},
		"a parent":           {"parent", "parent", nil, false},
		"a leading zero":     {"core-01.img", "core-01.img", nil, false},
		"upper case":         {"ghost-file-A.img", "ghost-file-A.img", nil, false},
		"an AppArmor policy": {"apparmor.img", "apparmor.img", nil, false},
		"connections":        {"netns-ct-12.img", "netns-ct-12.img", nil, false},
		"an older layout":    {"reg-files.img", "reg-files.img", nil, false},
		"an unknown field":   {"files.img", "reg_file_entry", with(unknown...), false},
		"an unknown type":    {"files.img", "file_entry", append(header("FILES"), append(binary.LittleEndian.AppendUint32(nil, uint32(len(enumeration))), enumeration...)...), false},
		"a NUL":              {"files.img", "reg_file_entry.name", nul, false},
		"no magic":           {"files.img", "of the kind FILES", nil, true},
		"of another kind":    {"files.img", "of the kind FILES", imageOf(t, "MNTS"), true},
		"cut short":          {"files.img", "cut short", good[:len(good)-1], true},
		"a length cut short": {"files.img", "cut short", append(slices.Clone(good), 1, 0), true},
		"a large entry":      {"files.img", "more than", append(slices.Clone(good), 0, 0, 0, 16), true},
		"a lacking field":    {"files.img", "required", append(header("FILES"), 0, 0, 0, 0), true},
		"no message":         {"files.img", "files.img", append(header("FILES"), 1, 0, 0, 0, 0xff), true},
		"two entries":        {"fs-1.img", "more entries", append(imageOf(t, "FS", &fs.FsEntry{CwdId: new(uint32), RootId: new(uint32)}), entry(t, &fs.FsEntry{CwdId: new(uint32), RootId: new(uint32)})...), true},
		"no entry":           {"fs-1.img", "no entry", header("FS"), true},
		"data cut short":     {"pipes-data.img", "cut short", imageOf(t, "PIPES_DATA", &pipedata.PipeDataEntry{PipeId: new(uint32), Bytes: proto.Uint32(3)}), true},
		"messages missing":   {"ipcns-msg-1.img", "missing", imageOf(t, "IPCNS_MSG", &ipcmsg.IpcMsgEntry{Desc: desc, Qbytes: new(uint32), Qnum: proto.Uint32(2)}), true},
		"a large part":       {"ghost-file-1.img", "cut short", imageOf(t, "GHOST_FILE", &ghostfile.GhostFileEntry{Uid: new(uint32), Gid: new(uint32), Mode: new(uint32), Chunks: new(true)}, &ghostfile.GhostChunkEntry{Len: proto.Uint64(1 << 63), Off: new(uint64)}), true},
		"many streams":       {"descriptors.json", "descriptors", []byte(`["","","","pipe:[1]"]`), false},
		"no streams":         {"descriptors.json", "descriptors.json", []byte(`{"a":1}`), false},
		"no device":          {"gpuckpt-files.txt", "gpuckpt-files.txt", []byte("1\t2\t../x\n"), false},
	} {
		dir := t.TempDir()
		put1(t, dir, c.file, c.data)
		want := ErrRefused
		if c.damaged {
			want = images.ErrDamaged
		}
		if _, err := copied(t, dir, nil); !errors.Is(err, want) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: error %v, want %v with %q", name, err, want, c.says)
		}
	}
	for name, make := range map[string]func(string) error{
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a link":      func(path string) error { return os.Symlink("/etc/shadow", path) },
		"a FIFO":      func(path string) error { return unix.Mkfifo(path, 0o600) },
	} {
		for _, file := range []string{"files.img", "pages-1.img"} {
			dir := t.TempDir()
			if err := make(filepath.Join(dir, file)); err != nil {
				t.Fatal(err)
			}
			if _, err := copied(t, dir, nil); !errors.Is(err, images.ErrDamaged) {
				t.Errorf("%s %s: error %v, want images.ErrDamaged", name, file, err)
			}
		}
	}
}

// A disk that cannot be read is no damaged checkpoint.
func TestReadError(t *testing.T) {
	good := append(imageOf(t, "FILES", fileOf("/")), entry(t, fileOf("/a"))...)
	for n := range good {
		err := Open("images").read(io.MultiReader(bytes.NewReader(good[:n]), iotest.ErrReader(unix.EIO)), int64(len(good)), "files.img", func(*Entry, *io.LimitedReader) error { return nil })
		if !errors.Is(err, unix.EIO) || errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "files.img") {
			t.Fatalf("after %d of %d bytes: %v", n, len(good), err)
		}
	}
}

// What CRIU does not get back is gone.
func TestDropped(t *testing.T) {
	dir := t.TempDir()
	d := &cgroup.CgroupDirEntry{DirName: new("x")}
	c := &cgroup.CgroupEntry{Controllers: []*cgroup.CgControllerEntry{{Cnames: []string{"pids"}, Dirs: []*cgroup.CgroupDirEntry{d}}}}
	want := string(imageOf(t, "CGROUP", c))
	d.DirPerms = &cgroup.CgroupPerms{Mode: proto.Uint32(0o4777), Uid: new(uint32), Gid: new(uint32)}
	d.Properties = []*cgroup.CgroupPropEntry{{Name: new("../../etc/passwd"), Value: new("x")}}
	put1(t, dir, "cgroup.img", imageOf(t, "CGROUP", c))
	got, err := copied(t, dir, nil)
	if err != nil || got["cgroup.img"] != want {
		t.Errorf("%q, %v; want %q", got["cgroup.img"], err, want)
	}
}

// All that is read of one set together has a bound, whoever reads it and however often.
func TestBounds(t *testing.T) {
	dir := t.TempDir()
	large := imageOf(t, "FILES", fileOf(strings.Repeat("x", 1<<20)))
	large = append(large, bytes.Repeat(large[8:], maxBytes>>20*2/3)...) // two thirds of what there may be
	put1(t, dir, "files.img", large)
	data := entry(t, &pipedata.PipeDataEntry{PipeId: new(uint32), Bytes: new(uint32)})
	put1(t, dir, "fifo-data.img", append(header("FIFO_DATA"), bytes.Repeat(data, maxBytes/2/len(data))...))
	s := Open(dir)
	nothing := func(*Entry) error { return nil }
	for range 3 {
		if err := s.Each("files.img", nothing); err != nil {
			t.Error(err)
		}
	}
	if err := s.Each("fifo-data.img", nothing); !errors.Is(err, images.ErrDamaged) || !strings.Contains(err.Error(), "bytes") {
		t.Errorf("got %v", err)
	}
}

// A copy is edited, and the image only by Edit and Append.
func TestEditedAndAppended(t *testing.T) {
	dir := t.TempDir()
	put1(t, dir, "files.img", imageOf(t, "FILES", fileOf("/first")))
	s := Open(dir)
	read := func() (names string) {
		err := s.Each("files.img", func(e *Entry) error {
			names += e.Message.(*fdinfo.FileEntry).GetReg().GetName()
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		return names
	}
	rename := func(e *Entry) error {
		e.Message.(*fdinfo.FileEntry).Reg.Name = new("/edited")
		return nil
	}
	to, err := NewDir(0)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := errors.Join(s.Copy(t.Context(), to, rename), to.Seal()); err != nil {
		t.Fatal(err)
	}
	if data, err := os.ReadFile(filepath.Join(to.Path(), "files.img")); err != nil || !bytes.Equal(data, imageOf(t, "FILES", fileOf("/edited"))) {
		t.Errorf("copied %q, %v", data, err)
	}
	if got := read(); got != "/first" {
		t.Errorf("after the copy %q", got)
	}
	if err := s.Edit("files.img", rename); err != nil {
		t.Fatal(err)
	}
	if got := read(); got != "/edited" {
		t.Errorf("edited %q", got)
	}
	if err := s.Append("files.img", fileOf("/more")); err != nil {
		t.Fatal(err)
	}
	if got := read(); got != "/edited/more" {
		t.Errorf("with more %q", got)
	}
}

// Nobody can change what CRIU reads, and the memory's pages are the checkpoint's file itself.
func TestDir(t *testing.T) {
	dir := goodDir(t)
	to, err := NewDir(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if err := Open(dir).Copy(t.Context(), to, nil); err != nil {
		t.Fatal(err)
	}
	if err := to.Seal(); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"files.img", "pages-1.img", "new.img"} {
		if f, err := os.OpenFile(filepath.Join(to.Path(), name), os.O_WRONLY|os.O_CREATE, 0o600); !errors.Is(err, unix.EROFS) {
			f.Close()
			t.Errorf("open %s for writing: %v, want %v", name, err, unix.EROFS)
		}
	}
	put1(t, dir, "files.img", []byte("changed since"))
	if data, err := os.ReadFile(filepath.Join(to.Path(), "files.img")); err != nil || strings.Contains(string(data), "since") {
		t.Errorf("%q, %v", data, err)
	}
	lent, err := os.Stat(filepath.Join(to.Path(), "pages-1.img"))
	if err != nil {
		t.Fatal(err)
	}
	own, err := os.Stat(filepath.Join(dir, "pages-1.img"))
	if err != nil || !os.SameFile(own, lent) {
		t.Errorf("the pages are not the same file (%v)", err)
	}
	mounted, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounted), dir) {
		t.Errorf("this process sees the mounts (%v)", err)
	}
	path := to.Path()
	to.Close()
	if _, err := os.Stat(filepath.Join(path, "files.img")); err == nil {
		t.Error("the directory is there after Close")
	}
	small, err := NewDir(4096)
	if err != nil {
		t.Fatal(err)
	}
	defer small.Close()
	put1(t, dir, "files.img", imageOf(t, "FILES", fileOf(strings.Repeat("x", 1<<16))))
	if err := Open(dir).Copy(t.Context(), small, nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("error %v, want %v", err, unix.ENOSPC)
	}
}

// What a copy holds is what a copy of it holds: there is one form of each entry.
func FuzzCopy(f *testing.F) {
	dir := goodDir(f)
	names, err := Open(dir).Names()
	if err != nil {
		f.Fatal(err)
	}
	for _, name := range names {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(name, data)
	}
	f.Fuzz(func(t *testing.T, name string, data []byte) {
		k := KindOf(name)
		if k == nil || k.form != entries {
			return
		}
		once, err := rewritten(t, dir, name, data)
		if err != nil {
			if !errors.Is(err, ErrRefused) && !errors.Is(err, images.ErrDamaged) {
				t.Errorf("%s: error %v", name, err)
			}
			return
		}
		twice, err := rewritten(t, dir, name, once)
		if err != nil || !bytes.Equal(once, twice) {
			t.Errorf("%s: a copy of the copy differs (%v):\n%x\n%x", name, err, once, twice)
		}
	})
}

// rewritten is an image as Copy writes it.
func rewritten(t *testing.T, dir, name string, data []byte) ([]byte, error) {
	t.Helper()
	put1(t, dir, name, data)
	var b bytes.Buffer
	err := Open(dir).rewrite(&b, KindOf(name), name, nil)
	return b.Bytes(), err
}

// messages returns the descriptors of all messages that the images of Kinds can have, each once.
// A message whose field is Refused is not looked into: it never comes so far.
func messages() (all []protoreflect.MessageDescriptor) {
	seen := make(map[protoreflect.FullName]bool)
	var add func(protoreflect.MessageDescriptor)
	add = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		all = append(all, m)
		for i := range m.Fields().Len() {
			fd := m.Fields().Get(i)
			if may := Fields()[fd.FullName()].May; fd.Message() != nil && may != Refused {
				add(fd.Message())
			}
		}
	}
	kinds := Kinds()
	for i := range kinds {
		if k := &kinds[i]; k.form == entries {
			add(k.entry(0).ProtoReflect().Descriptor())
			add(k.entry(1).ProtoReflect().Descriptor())
		}
	}
	add((*ipcmsg.IpcMsg)(nil).ProtoReflect().Descriptor())
	return all
}

// Every field of every message that an image can have is on the list, and nothing else is.
func TestEveryFieldIsListed(t *testing.T) {
	listed := maps.Clone(Fields())
	n := 0
	for _, m := range messages() {
		for i := range m.Fields().Len() {
			name := m.Fields().Get(i).FullName()
			if _, ok := listed[name]; !ok {
				t.Errorf("%s is not in fields.txt", name)
			}
			delete(listed, name)
			n++
		}
	}
	for name := range listed {
		t.Errorf("%s is in fields.txt, and no image has it", name)
	}
	t.Logf("%d fields of %d messages, 0 unknown", n, len(messages()))
}

// What proves who made a checkpoint, and what describes it, lies beside CRIU's images and does not
// reach CRIU.
func TestBesideTheImages(t *testing.T) {
	for _, name := range []string{"gpuckpt.json", "gpuckpt.manifest", "gpuckpt.manifest.sig", "gpuckpt.manifest.0123456789abcdef.sig", "config.dump", "stats-dump"} {
		if k := KindOf(name); k == nil || k.form != leftOut {
			t.Errorf("%s: %+v", name, k)
		}
	}
}

// A number has one form.
func TestNumbersInNames(t *testing.T) {
	for name, magic := range map[string]string{
		"core-0.img": "CORE", "core-10.img": "CORE", "core-18446744073709551615.img": "CORE", "ghost-file-0.img": "GHOST_FILE", "ghost-file-a0f.img": "GHOST_FILE",
		"core-.img": "", "core-01.img": "", "core-a.img": "", "core--1.img": "", "core-1": "", "core-1.img.img": "", "xcore-1.img": "", "core-184467440737095516150.img": "",
		"ghost-file-A.img": "", "ghost-file-0a.img": "", "ghost-file-12345678123456789.img": "", "pagemap-shmem-1.img": "PAGEMAP", "tmpfs-dev-x.tar.gz.img": "", "files-1.img": "",
	} {
		if k := KindOf(name); (k == nil) != (magic == "") || k != nil && k.Magic != magic {
			t.Errorf("%s: %+v, want %q", name, k, magic)
		}
	}
}

// A file of the directory that a process which is being started still has open is waited for.
func TestDirIsBusy(t *testing.T) {
	d, err := NewDir(0)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	fd, err := unix.Openat(d.tmpfs, "file", unix.O_WRONLY|unix.O_CREAT|unix.O_CLOEXEC, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(100*time.Millisecond, func() { unix.Close(fd) })
	if err := d.Seal(); err != nil {
		t.Error(err)
	}
}

// Of two values that are not allowed, the one of the lower number is named, in whatever order they are looked at.
func TestFirstOfTwo(t *testing.T) {
	s := &skinet.InetSkEntry{Type: new(uint32(unix.SOCK_SEQPACKET)), State: new(uint32(13))}
	if err := check(s.ProtoReflect()); err == nil || !strings.Contains(err.Error(), "inet_sk_entry.type: 5") {
		t.Error(err)
	}
}
