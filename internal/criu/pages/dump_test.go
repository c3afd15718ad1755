// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package pages

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// compile builds C sources into a temporary directory.
func compile(t *testing.T, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no C compiler")
	}
	to := filepath.Join(t.TempDir(), name)
	if out, err := exec.Command("gcc", append([]string{"-O2", "-o", to}, args...)...).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	return to
}

// A program that the library is loaded into does not see the pages that are left out, in either way
// of looking, nor the data of a file; one that has no list sees all.
func TestLeaveOut(t *testing.T) {
	sources, err := filepath.Glob("../plugin/*.c")
	if err != nil {
		t.Fatal(err)
	}
	library := compile(t, "library.so", append([]string{"-fPIC", "-shared", "-fvisibility=hidden"}, sources...)...)
	looks := compile(t, "looks", "testdata/looks.c")
	list := filepath.Join(t.TempDir(), "list")
	for _, test := range []struct{ ranges, want string }{
		{"", "16, read 16"},
		{"$$ 100000000000 100000010000", "0, read 0"},
		{"$$ 100000004000 100000008000", "12, read 12"},
		{"$$ 0ffffffff000 100000001000\n$$ 100000003000 100000004000\n$$ 10000000f000 100000020000", "13, read 13"},
		{"1 100000004000 100000008000", "16, read 16"}, // another process's
	} {
		cmd := exec.Command("sh", "-c", `printf "`+strings.ReplaceAll(test.ranges, "\n", `\n`)+`\n" > "$GPUCKPT_LEFT_OUT"; exec "$0"`, looks)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LD_BIND_NOW=1", "LD_PRELOAD=" + library, "GPUCKPT_LEFT_OUT=" + list}
		out, err := cmd.CombinedOutput()
		got := strings.Replace(string(out), "scanned -1,", "scanned "+strings.Fields(test.want)[0], 1) // before Linux 6.7
		if err != nil || strings.TrimSpace(got) != "scanned "+test.want {
			t.Errorf("%q: %v, %s, want %s", test.ranges, err, out, test.want)
		}
	}
	for _, want := range []string{"none", "0"} { // with the file in the list, and with others
		file := filepath.Join(t.TempDir(), "file")
		if err := os.WriteFile(file, []byte("data"), 0o600); err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Stat(file, &st); err != nil {
			t.Fatal(err)
		}
		line := fmt.Sprintf("0 %x %x\n", st.Dev, st.Ino)
		if want == "0" {
			line = fmt.Sprintf("0 %x %x\n0 %x %x\n", st.Dev, st.Ino+1, st.Dev+1, st.Ino)
		}
		if err := os.WriteFile(list, []byte(line), 0o600); err != nil {
			t.Fatal(err)
		}
		cmd := exec.Command(looks, file)
		cmd.Env = []string{"LD_BIND_NOW=1", "LD_PRELOAD=" + library, "GPUCKPT_LEFT_OUT=" + list}
		if out, err := cmd.CombinedOutput(); err != nil || strings.TrimSpace(string(out)) != want {
			t.Errorf("%q: %v, %s, want %s", line, err, out, want)
		}
	}
}

// What has memory of its own is found: not what was never written, nor only read.
func TestScan(t *testing.T) {
	memory := mapMemory(t, 12, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	for _, page := range []int{0, 1, 5, 11} {
		memory[page*pageBytes] = 1
	}
	if memory[8*pageBytes] != 0 {
		t.Fatal("new memory is not empty")
	}
	d := newDumper()
	at := addressOf(memory)
	all := []span{{at, at + 12*pageBytes}}
	if kept, err := d.scan(self(), all, 5*pageBytes); err != nil || len(kept) > 0 {
		t.Errorf("with four pages: kept %v, %v", kept, err)
	}
	if _, err := d.scan(self(), all, pageBytes); err != nil {
		t.Fatal(err)
	}
	if h := d.of[self()]; len(h.kept) > 0 {
		t.Errorf("small runs are kept: %v", h.runs)
	}
	f, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	zero, err := zeroFrame()
	if err != nil {
		t.Fatal(err)
	}
	runs, err := scan(f, all[0], zero)
	want := []span{{at, at + 2*pageBytes}, {at + 5*pageBytes, at + 6*pageBytes}, {at + 11*pageBytes, at + 12*pageBytes}}
	if err != nil || !reflect.DeepEqual(runs, want) {
		t.Errorf("found %v, %v, want %v", runs, err, want)
	}
}

// No worker is started for a process whose memory is less than one mapping would have to hold, however much
// it maps.
func TestNoWorkerForEmptyMappings(t *testing.T) {
	mapMemory(t, 4<<30/pageBytes, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE, -1)
	for least, want := range map[uint64]bool{4 << 30: false, pageBytes: true} {
		started := false
		of := Dumping{List: filepath.Join(t.TempDir(), "list"), Least: least, Init: os.Getpid()}
		of.Pids = func() ([]int, error) { return []int{os.Getpid()}, nil }
		of.Start = func() (*Worker, error) { started = true; return nil, errors.New("none is needed") }
		d := NewDump(t.Context(), of)
		d.MakeRoom()
		d.Begin()
		d.Close()
		if started != want {
			t.Errorf("at least %d bytes: a worker is started: %v", least, started)
		}
	}
}

func self() source { return source{pid: os.Getpid()} }

// dumped makes the images of a process whose mapping CRIU has left out, and returns where it is.
func dumped(t *testing.T, dir string) (d *dumper, content []byte, page uint64) {
	t.Helper()
	const pages = 300
	content = mapMemory(t, pages, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	for i := range pages {
		if i != 200 { // written, and zeros
			content[i*pageBytes+7] = byte(i%250 + 1)
		} else {
			content[i*pageBytes+7] = 0
		}
	}
	at := addressOf(content)
	page = at / pageBytes
	d = newDumper()
	if kept, err := d.scan(self(), []span{{at, at + pages*pageBytes}}, least); err != nil || len(kept) != 1 {
		t.Fatalf("kept %v, %v", kept, err)
	}
	writeImage(t, dir, "mm-7.img", "MM", memory(mapping(page, pages)))
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(10, 5), run(page+pages+10, 3))
	writePages(t, dir, "pages-3.img", 20)
	return d, content, page
}

// The images are then as CRIU would have made them: in order, and all memory where the pagemap says.
func TestMerge(t *testing.T) {
	for _, digest := range []bool{false, true} {
		testMerge(t, digest)
	}
}

func testMerge(t *testing.T, digest bool) {
	t.Helper()
	dir := t.TempDir()
	d, content, page := dumped(t, dir)
	done, err := d.merge(self(), 7, dir, digest)
	if err != nil || done.Bytes != uint64(len(content)) || done.Name != "pages-3.img" {
		t.Fatalf("%+v, %v", done, err)
	}
	_, runs, err := readRuns(image.Open(dir), "pagemap-7.img")
	if err != nil {
		t.Fatal(err)
	}
	var got []span
	for _, r := range runs {
		got = append(got, span{r.Start / pageBytes, r.End / pageBytes})
	}
	if want := []span{{10, 15}, {page, page + 300}, {page + 310, page + 313}}; !reflect.DeepEqual(got, want) {
		t.Errorf("the pagemap has %v, want %v", got, want)
	}
	data, err := os.ReadFile(filepath.Join(dir, "pages-3.img"))
	if err != nil {
		t.Fatal(err)
	}
	if len(data) != 308*pageBytes || data[0] != 1 || data[305*pageBytes] != 6 || !bytes.Equal(data[5*pageBytes:305*pageBytes], content) {
		t.Errorf("the memory is not where the pagemap says: %d bytes", len(data))
	}
	if want := []string{images.DigestBlock(data)}; digest && !slices.Equal(done.Digests, want) || !digest && done.Digests != nil {
		t.Errorf("the digests are %v, want %v: %t", done.Digests, want, digest)
	}
	if left, err := filepath.Glob(filepath.Join(dir, temporary+"*")); err != nil || len(left) > 0 {
		t.Errorf("left are %v, %v", left, err)
	}
}

// An image of several blocks, of memory of the process and pages of CRIU's in turns, has all bytes and
// the digests of what it has. One that cannot be read whole has neither.
func TestMergedBlocks(t *testing.T) {
	const part, parts = 1021, 17 // pages, in no step with what is copied at once, and more than a block
	content := mapMemory(t, part*parts, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	for i := range len(content) / 512 {
		content[i*512+i%512] = byte(i)
	}
	clear(content[3*part*pageBytes : 4*part*pageBytes])
	dir := t.TempDir()
	oldPath, path := filepath.Join(dir, "old"), filepath.Join(dir, "pages-1.img")
	var criu []byte
	var runs []memoryRun
	for i := range uint64(parts) {
		s := span{addressOf(content) + i*part*pageBytes, addressOf(content) + (i+1)*part*pageBytes}
		r := memoryRun{span: s}
		if i%3 == 1 {
			r.entry, r.from = new(pagemap.PagemapEntry), uint64(len(criu))
			criu = append(criu, content[i*part*pageBytes:(i+1)*part*pageBytes]...)
		}
		runs = append(runs, r)
	}
	if err := os.WriteFile(oldPath, criu, 0o600); err != nil {
		t.Fatal(err)
	}
	old, err := os.Open(oldPath)
	if err != nil {
		t.Fatal(err)
	}
	defer old.Close()
	digests, err := writePagesOf(path, old, memoryOf(os.Getpid()), runs, nil, true)
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(got, content) {
		t.Errorf("it has other bytes, or %v", err)
	}
	if want := []string{images.DigestBlock(content[:images.BlockBytes]), images.DigestBlock(content[images.BlockBytes:])}; !slices.Equal(digests, want) {
		t.Errorf("the digests are %v, want %v", digests, want)
	}
	runs[16].entry, runs[16].from = new(pagemap.PagemapEntry), uint64(len(criu))
	if digests, err := writePagesOf(path, old, memoryOf(os.Getpid()), runs, nil, true); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("of a short image: %v, %v", digests, err)
	}
}

// A CRIU that was not kept from dumping has the memory already.
func TestMergeLeavesWhatCRIUHas(t *testing.T) {
	dir := t.TempDir()
	d, _, page := dumped(t, dir)
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(10, 5), run(page, 300), run(page+310, 3))
	before, err := os.ReadFile(filepath.Join(dir, "pagemap-7.img"))
	if err != nil {
		t.Fatal(err)
	}
	if done, err := d.merge(self(), 7, dir, true); err != nil || done.Bytes != 0 || done.Digests != nil {
		t.Errorf("%+v, %v", done, err)
	}
	if after, err := os.ReadFile(filepath.Join(dir, "pagemap-7.img")); err != nil || !bytes.Equal(before, after) {
		t.Errorf("the image has changed: %v", err)
	}
}

// Of a mapping that CRIU has dumped in part, the other pages are saved: none is lost, none is twice.
func TestMergeOfAPart(t *testing.T) {
	dir := t.TempDir()
	d, content, page := dumped(t, dir)
	writeImage(t, dir, "pagemap-7.img", "PAGEMAP", head(3), run(page+100, 2), run(page+298, 2))
	writePages(t, dir, "pages-3.img", 4)
	if done, err := d.merge(self(), 7, dir, true); err != nil || done.Bytes != 296*pageBytes {
		t.Fatalf("%+v, %v", done, err)
	}
	_, runs, err := readRuns(image.Open(dir), "pagemap-7.img")
	if err != nil {
		t.Fatal(err)
	}
	var got []span
	for _, r := range runs {
		got = append(got, span{r.Start / pageBytes, r.End / pageBytes})
	}
	if want := []span{{page, page + 100}, {page + 100, page + 102}, {page + 102, page + 298}, {page + 298, page + 300}}; !reflect.DeepEqual(got, want) {
		t.Errorf("the pagemap has %v, want %v", got, want)
	}
	data, err := os.ReadFile(filepath.Join(dir, "pages-3.img"))
	if err != nil {
		t.Fatal(err)
	}
	if len(data) != 300*pageBytes || data[100*pageBytes] != 1 || data[298*pageBytes] != 3 ||
		!bytes.Equal(data[:100*pageBytes], content[:100*pageBytes]) || !bytes.Equal(data[102*pageBytes:298*pageBytes], content[102*pageBytes:298*pageBytes]) {
		t.Errorf("the memory is not where the pagemap says: %d bytes", len(data))
	}
}

// A mapping that CRIU has not dumped is an error: its memory would be lost.
func TestMergeRefuses(t *testing.T) {
	dir := t.TempDir()
	d, _, page := dumped(t, dir)
	writeImage(t, dir, "mm-7.img", "MM", memory(mapping(page, 299)))
	if done, err := d.merge(self(), 7, dir, true); err == nil || !strings.Contains(err.Error(), "CRIU has dumped no mapping") {
		t.Errorf("%+v, %v", done, err)
	}
}
