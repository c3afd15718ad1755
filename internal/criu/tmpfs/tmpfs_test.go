// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tmpfs

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
)

// mount returns a new tmpfs, in which a directory is the root of a test's mount.
func mount(t testing.TB, options string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("test", dir, "tmpfs", 0, options); err != nil {
		t.Skipf("mount a tmpfs: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func open(t testing.TB, name string) *os.File {
	t.Helper()
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// fill makes one of each thing that a tmpfs can have.
func fill(t testing.TB, dir string) {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	in := func(name string) string { return filepath.Join(dir, name) }
	must(os.WriteFile(in("small"), []byte("small"), 0o600))
	must(os.Chown(in("small"), 1234, 2345))
	must(os.Chmod(in("small"), 0o640|fs.ModeSetgid))
	must(unix.Setxattr(in("small"), "trusted.note", []byte("kept\x00"), 0))
	must(os.WriteFile(in("empty"), nil, 0o400))
	must(os.WriteFile(in("not\xfftext\n"), []byte("x"), 0o600))
	must(os.MkdirAll(in("a/deep"), 0o700))
	must(os.WriteFile(in("a/deep/file"), bytes.Repeat([]byte("0123456789abcdef"), 3*chunk/16+5), 0o644))
	must(os.Link(in("a/deep/file"), in("b-same")))
	must(os.Symlink("/etc/passwd", in("out")))
	must(os.Symlink("a/deep", in("a/loop")))
	must(os.Lchown(in("out"), 7, 8))
	must(os.Link(in("out"), in("out-same")))
	must(unix.Mkfifo(in("fifo"), 0o622))
	must(unix.Mknod(in("null"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3))))
	must(os.Chmod(in("null"), 0o666))
	sparse, err := os.Create(in("sparse"))
	must(err)
	_, err = sparse.WriteAt([]byte("in the middle"), 100<<20)
	must(err)
	must(sparse.Truncate(1 << 40))
	must(sparse.Close())
	socket, err := net.ListenUnix("unix", &net.UnixAddr{Name: in("socket"), Net: "unix"})
	must(err)
	t.Cleanup(func() { socket.Close() })
	must(os.Chmod(in("a"), 0o777|fs.ModeSticky))
	old := []unix.Timespec{unix.NsecToTimespec(1e9 + 7), unix.NsecToTimespec(2e9 + 9)}
	for _, name := range []string{"small", "out", "fifo", "a", "."} {
		must(unix.UtimesNanoAt(unix.AT_FDCWD, in(name), old, unix.AT_SYMLINK_NOFOLLOW))
	}
}

// describe lists what is in a directory, with all that Save keeps.
func describe(t testing.TB, dir string) (list []string) {
	t.Helper()
	inodes := make(map[uint64]string)
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel(dir, path)
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		text := fmt.Sprintf("%q mode %o owner %d:%d time %d device %d", name, st.Mode, st.Uid, st.Gid, st.Mtim.Nano(), st.Rdev)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFSOCK:
			return nil
		case unix.S_IFDIR:
		default:
			if first, ok := inodes[st.Ino]; ok {
				list = append(list, fmt.Sprintf("%q is %q", name, first))
				return nil
			}
			inodes[st.Ino] = name
		}
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFLNK:
			to, _ := os.Readlink(path)
			text += " -> " + to
		case unix.S_IFREG:
			value := make([]byte, 100)
			if n, err := unix.Lgetxattr(path, "trusted.note", value); err == nil {
				text += fmt.Sprintf(" note %q", value[:n])
			}
			text += fmt.Sprintf(" %d bytes in %d blocks", st.Size, st.Blocks)
			if st.Size < 1<<30 {
				data, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				text += fmt.Sprintf(" %x", sha256.Sum256(data))
			} else {
				data := make([]byte, 20)
				open(t, path).ReadAt(data, 100<<20)
				text += fmt.Sprintf(" %q", data)
			}
		}
		list = append(list, text)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func compare(t *testing.T, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	for _, line := range want {
		if !slices.Contains(got, line) {
			t.Errorf("want %s", line)
		}
	}
	for _, line := range got {
		if !slices.Contains(want, line) {
			t.Errorf("got  %s", line)
		}
	}
}

// saved returns an image of a directory.
func saved(t testing.TB, dir string) *os.File {
	t.Helper()
	image, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { image.Close() })
	if err := Save(open(t, dir), image); err != nil {
		t.Fatal(err)
	}
	return image
}

// All but sockets comes back as it was: names, modes, owners, times, attributes, holes, links.
func TestSaveAndLoad(t *testing.T) {
	from, to := mount(t, ""), mount(t, "")
	fill(t, from)
	want := describe(t, from)
	if len(want) != 14 {
		t.Fatalf("%d things: %q", len(want), want)
	}
	image := saved(t, from)
	if err := Load(image, open(t, to), false); err != nil {
		t.Fatal(err)
	}
	compare(t, describe(t, to), want)
	if st, err := image.Stat(); err != nil || st.Size() > 4*chunk {
		t.Errorf("the image has %d bytes, %v", st.Size(), err)
	}
}

// What CRIU had made by tar before is still restored.
func TestLoadArchive(t *testing.T) {
	from, to := mount(t, ""), mount(t, "")
	fill(t, from)
	// tar keeps no attributes, whole seconds, and would read 1 TiB of zeros.
	for name, change := range map[string]func(string) error{
		"small":  func(at string) error { return unix.Removexattr(at, "trusted.note") },
		"sparse": func(at string) error { return os.Truncate(at, 1<<27) },
	} {
		if err := change(filepath.Join(from, name)); err != nil {
			t.Fatal(err)
		}
	}
	whole := unix.NsecToTimespec(3e9)
	err := filepath.WalkDir(from, func(path string, _ fs.DirEntry, _ error) error {
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{whole, whole}, unix.AT_SYMLINK_NOFOLLOW)
	})
	if err != nil {
		t.Fatal(err)
	}
	want := describe(t, from)
	image, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	// As criu/filesystems.c, tmpfs_dump.
	cmd := exec.CommandContext(t.Context(), "tar", "--create", "--gzip", "--no-unquote", "--no-wildcards", "--one-file-system",
		"--check-links", "--preserve-permissions", "--sparse", "--numeric-owner", "--directory", "/proc/self/fd/0", ".")
	cmd.Stdin, cmd.Stdout = open(t, from), image
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if err := Load(image, open(t, to), false); err != nil {
		t.Fatal(err)
	}
	compare(t, describe(t, to), want)

	st, _ := image.Stat()
	if err := image.Truncate(st.Size() - 100); err != nil {
		t.Fatal(err)
	}
	if err := Load(image, open(t, mount(t, "")), false); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("an archive that is cut short: %v", err)
	}
}

// What is there already stays where a directory is shared, and is an error elsewhere.
func TestLoadKeeps(t *testing.T) {
	from, to := mount(t, ""), mount(t, "")
	fill(t, from)
	image := saved(t, from)
	other := []byte("of another container")
	if err := os.WriteFile(filepath.Join(to, "small"), other, 0o666); err != nil {
		t.Fatal(err)
	}
	for range 2 { // two containers of a pod
		if err := Load(image, open(t, to), true); err != nil {
			t.Fatal(err)
		}
	}
	if err := Load(image, open(t, to), false); !errors.Is(err, os.ErrExist) {
		t.Errorf("error %v, want that something exists", err)
	}
	if got, err := os.ReadFile(filepath.Join(to, "small")); err != nil || !bytes.Equal(got, other) {
		t.Errorf("small is %q, %v", got, err)
	}
	if got, want := describe(t, filepath.Join(to, "a")), describe(t, filepath.Join(from, "a")); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A tmpfs that is smaller than the one that was saved says so.
func TestLoadIntoSmaller(t *testing.T) {
	from := mount(t, "")
	fill(t, from)
	err := Load(saved(t, from), open(t, mount(t, "size=1m")), false)
	if !errors.Is(err, unix.ENOSPC) || !strings.Contains(err.Error(), "it does not fit") {
		t.Errorf("error %v", err)
	}
}

// image returns an image of any entries, with room for data in front.
func image(t testing.TB, entries ...*entry) *os.File {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "image"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	table := table{used: 3 * pageSize}
	for _, e := range entries {
		if err := table.add(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := table.finish(f); err != nil {
		t.Fatal(err)
	}
	return f
}

func file(name string, data ...piece) *entry {
	return &entry{Name: []byte(name), Mode: unix.S_IFREG | 0o600, Size: 2 * pageSize, Data: data}
}

// An image that leads out of the directory, or that no tmpfs can have made, is refused, and
// nothing outside has changed.
func TestLoadRefuses(t *testing.T) {
	link := func(name, to string) *entry {
		return &entry{Name: []byte(name), Mode: unix.S_IFLNK | 0o777, Link: []byte(to)}
	}
	outside := t.TempDir()
	for what, entries := range map[string][]*entry{
		"absolute":             {file("/x")},
		"parent":               {file("../x")},
		"parent within":        {file("a/../../x")},
		"not clean":            {file("./x")},
		"empty":                {file("")},
		"long":                 {file(strings.Repeat("x", 256))},
		"NUL":                  {file("x\x00y")},
		"by a link":            {link("a", outside), file("a/x")},
		"by a relative link":   {link("a", "../../../.."+outside), file("a/x")},
		"over a link":          {link("a", filepath.Join(outside, "x")), file("a")},
		"hard link out":        {{Name: []byte("h"), Mode: unix.S_IFREG, Same: []byte("../x")}},
		"hard link by a link":  {link("a", "/etc"), {Name: []byte("h"), Mode: unix.S_IFREG, Same: []byte("a/passwd")}},
		"hard link to nothing": {{Name: []byte("h"), Mode: unix.S_IFREG, Same: []byte("x")}},
		"no parent":            {file("a/x")},
		"twice":                {file("x"), file("x")},
		"socket":               {{Name: []byte("s"), Mode: unix.S_IFSOCK | 0o600}},
		"mode":                 {{Name: []byte("s"), Mode: unix.S_IFREG | 0o100000<<4}},
		"no type":              {{Name: []byte("s"), Mode: 0o600}},
		"root is a file":       {file(".")},
		"owner":                {{Name: []byte("s"), Mode: unix.S_IFREG, UID: ^uint32(0)}},
		"attribute":            {{Name: []byte("s"), Mode: unix.S_IFREG, Xattrs: map[string][]byte{"overlay.opaque": nil}}},
		"negative size":        {{Name: []byte("s"), Mode: unix.S_IFREG, Size: -1}},
		"data of a directory":  {{Name: []byte("s"), Mode: unix.S_IFDIR, Size: pageSize, Data: []piece{{0, 1, pageSize}}}},
		"data in the header":   {file("x", piece{0, 1, 0})},
		"data behind the end":  {file("x", piece{0, pageSize, 1 << 40})},
		"data in the table":    {file("x", piece{0, pageSize, 3 * pageSize})},
		"data beyond the file": {file("x", piece{pageSize, pageSize + 1, pageSize})},
		"data out of order":    {file("x", piece{pageSize, 1, pageSize}, piece{0, 1, 2 * pageSize})},
		"data twice":           {file("x", piece{0, pageSize, pageSize}), file("y", piece{0, pageSize, pageSize})},
		"data that overflows":  {file("x", piece{1, 1<<63 - 1, pageSize})},
		"negative data":        {file("x", piece{0, -1, pageSize})},
	} {
		dir := mount(t, "size=1m")
		if err := Load(image(t, entries...), open(t, dir), false); err == nil {
			t.Errorf("%s: it is taken", what)
		}
	}
	if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
		t.Errorf("outside is %v, %v", left, err)
	}
	text, err := os.Create(filepath.Join(t.TempDir(), "text"))
	if err != nil {
		t.Fatal(err)
	}
	defer text.Close()
	header := append([]byte(magic), make([]byte, 16)...)
	binary.LittleEndian.PutUint64(header[len(magic):], pageSize)
	for _, bad := range []string{"", "text", "\x1f\x8b", string(header), magic} {
		if err := text.Truncate(0); err != nil {
			t.Fatal(err)
		}
		if _, err := text.WriteAt([]byte(bad), 0); err != nil {
			t.Fatal(err)
		}
		if err := Load(text, open(t, mount(t, "")), false); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// No image writes outside of the directory that it is restored into, whatever it holds.
func FuzzLoad(f *testing.F) {
	from, base := mount(f, "size=8m"), mount(f, "size=8m")
	for name, text := range map[string]string{"a": "text", "b": strings.Repeat("x", 5000)} {
		if err := os.WriteFile(filepath.Join(from, name), []byte(text), 0o600); err != nil {
			f.Fatal(err)
		}
	}
	if err := os.Symlink("../canary", filepath.Join(from, "link")); err != nil {
		f.Fatal(err)
	}
	data, err := os.ReadFile(saved(f, from).Name())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(data)
	canary := filepath.Join(base, "canary")
	if err := os.Mkdir(canary, 0o700); err != nil {
		f.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(canary, "file"), []byte("alive"), 0o600); err != nil {
		f.Fatal(err)
	}
	want := describe(f, canary)
	inside := filepath.Join(base, "inside")
	f.Fuzz(func(t *testing.T, data []byte) {
		if err := os.RemoveAll(inside); err != nil {
			t.Fatal(err)
		}
		if err := os.Mkdir(inside, 0o700); err != nil {
			t.Fatal(err)
		}
		name := filepath.Join(t.TempDir(), "image")
		if err := os.WriteFile(name, data, 0o600); err != nil {
			t.Fatal(err)
		}
		_ = Load(open(t, name), open(t, inside), false)
		if got := describe(t, canary); !slices.Equal(got, want) {
			t.Fatalf("the canary is %q, want %q", got, want)
		}
		if left, err := os.ReadDir(base); err != nil || len(left) != 2 {
			t.Fatalf("outside is %v, %v", left, err)
		}
	})
}

// What is at /dev/shm is carried once, and a checkpoint whose directory is not there is no checkpoint
// without it.
func TestBeside(t *testing.T) {
	home, images, from, to := t.TempDir(), t.TempDir(), mount(t, ""), mount(t, "")
	t.Setenv("PATH", home)
	if err := os.WriteFile(filepath.Join(home, program), nil, 0o700); err != nil {
		t.Fatal(err)
	}
	fill(t, from)
	prepare := func(shm, images string) {
		t.Helper()
		text := fmt.Sprintf(`{"shm": %q, "images": %q}`, shm, images)
		if err := os.WriteFile(filepath.Join(home, settings), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(filepath.Join(home, carried)); err != nil {
			t.Fatal(err)
		}
	}
	prepare(to, images)
	if err := beside(loadShm); err != nil {
		t.Errorf("a checkpoint without it: %v", err)
	}
	prepare(from, images)
	for range 2 {
		if err := beside(saveShm); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(from, "later"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	prepare(to, images)
	if err := beside(loadShm); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(to, "later")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("it was saved twice: %v", err)
	}
	if _, err := os.Stat(filepath.Join(to, "a/deep/file")); err != nil {
		t.Error(err)
	}
	prepare(to, filepath.Join(images, "none"))
	if err := beside(loadShm); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without a checkpoint: %v", err)
	}
	prepare("", images)
	if err := beside(saveShm); err != nil {
		t.Error(err)
	}
}

// The program that starts four times in each operation starts fast because it imports little: the
// shim's other packages take twice as long as the rest of it.
func TestProgramImportsLittle(t *testing.T) {
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "../../../cmd/gpuckpt-tmpfs").Output()
	if err != nil {
		t.Fatal(err)
	}
	for pkg := range strings.Lines(string(out)) {
		switch host, _, _ := strings.Cut(pkg, "/"); {
		case !strings.Contains(host, "."), strings.HasPrefix(pkg, "golang.org/x/"), strings.HasPrefix(pkg, "github.com/opencontainers/runtime-spec/"):
		case slices.Contains([]string{"cmd/gpuckpt-tmpfs", "internal/criu/loopback", "internal/criu/tmpfs", "internal/node/tarname", "internal/node/version", "internal/node/visible"},
			strings.TrimPrefix(strings.TrimSpace(pkg), "github.com/gpuckpt/gpuckpt/")):
		default:
			t.Errorf("it imports %s", pkg)
		}
	}
}

func TestProgram(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if path, err := Program(); err != nil || path != self {
		t.Errorf("without one it is %q, %v; want this program, %s", path, err, self)
	}
}
