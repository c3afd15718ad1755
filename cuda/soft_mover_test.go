// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"lukechampine.com/blake3"
	"lukechampine.com/blake3/guts"
)

const mib = 1 << 20

// softMover starts a mover on a machine with these device files.
func softMover(t *testing.T, dev string, more func(*Options)) *Mover {
	return &Mover{softHelper(t, dev, more)}
}

// noise returns so many bytes, all of them different from run to run of the generator's seed, in which
// the ranges, in MiB, are zeros.
func noise(seed uint64, size int, zeros ...[2]int) []byte {
	data := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(seed)}).Read(data)
	for _, z := range zeros {
		clear(data[z[0]*mib : z[1]*mib])
	}
	return data
}

// holding returns a file with these bytes, of which zeros are holes.
func holding(t *testing.T, data []byte) *os.File {
	t.Helper()
	f := empty(t, t.TempDir())
	do(t, f.Truncate(int64(len(data))))
	for at := 0; at < len(data); at += 4096 {
		page := data[at:min(at+4096, len(data))]
		if bytes.Count(page, []byte{0}) < len(page) {
			_, err := f.WriteAt(page, int64(at))
			do(t, err)
		}
	}
	return f
}

func empty(t *testing.T, dir string) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprint("memory-", rand.Uint64())), os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	do(t, err)
	t.Cleanup(func() { f.Close() })
	return f
}

// tmpfs mounts one of so many MiB.
func tmpfs(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	do(t, unix.Mount("none", dir, "tmpfs", 0, fmt.Sprintf("size=%dm,huge=advise", size)))
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	return dir
}

// filled makes memory of the bytes.
func filled(t *testing.T, m *Mover, gpu int, piece uint64, data []byte) []Memory {
	t.Helper()
	memory, parts, err := m.CopyIn(t.Context(), softUUID(gpu), piece, []Span{{File: holding(t, data), Bytes: uint64(len(data))}}, 0)
	do(t, err)
	digested(t, parts, data)
	t.Cleanup(func() { CloseMemory(memory) })
	return memory
}

// has fails the test unless the file has the bytes from an offset on.
func has(t *testing.T, f *os.File, offset int64, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	_, err := f.ReadAt(got, offset)
	do(t, err)
	if !bytes.Equal(got, want) {
		for i := range want {
			if got[i] != want[i] {
				t.Fatalf("byte %d of %d is %#x, want %#x", i, len(want), got[i], want[i])
			}
		}
	}
}

// digested fails the test unless the parts are what a GPU computes of the data: with them the blocks have the digests that
// BLAKE3 has.
func digested(t *testing.T, parts Parts, data []byte) {
	t.Helper()
	if len(parts) != len(data)/mib*partValue {
		t.Fatalf("%d bytes have %d bytes of parts", len(data), len(parts))
	}
	const block = 64 * mib
	for at := 0; at < len(data); at += block {
		end := min(at+block, len(data))
		root := parentOf(parts[at/mib*partValue : end/mib*partValue])
		root.Flags |= guts.FlagRoot
		got := guts.WordsToBytes(guts.CompressNode(root))
		if want := blake3.Sum256(data[at:end]); !bytes.Equal(got[:32], want[:]) {
			t.Fatalf("the block at %d has the digest %x, want %x", at, got[:32], want)
		}
	}
}

func parentOf(parts Parts) guts.Node {
	left := partValue
	for 2*left < len(parts) {
		left *= 2
	}
	value := func(parts Parts) (value [8]uint32) {
		if len(parts) > partValue {
			return guts.ChainingValue(parentOf(parts))
		}
		for i := range value {
			value[i] = binary.LittleEndian.Uint32(parts[4*i:])
		}
		return value
	}
	return guts.ParentNode(value(parts[:left]), value(parts[left:]), &guts.IV, 0)
}

// stored returns how many bytes of a file are stored.
func stored(t *testing.T, f *os.File) int64 {
	t.Helper()
	var st unix.Stat_t
	do(t, unix.Fstat(int(f.Fd()), &st))
	return st.Blocks * 512
}

// Memory of several GPUs, in pieces of all sizes, comes into being from files and goes to one by another
// helper, while nobody has it.
func TestSoftMoverMovesMemory(t *testing.T) {
	dev := devices(t, 2)
	one, other := softMover(t, dev, nil), softMover(t, dev, nil)
	do(t, one.Ready(t.Context(), softUUID(0), 2))
	data := noise(1, 38*mib, [2]int{6, 14}, [2]int{20, 21})
	memory := append(filled(t, one, 0, 10*mib, data[:26*mib]), filled(t, one, 1, 12*mib, data[26*mib:])...)
	if len(memory) != 4 || memory[2].Bytes != 6*mib || memory[3].Bytes != 12*mib {
		t.Fatalf("pieces: %+v", memory)
	}
	do(t, one.Close())
	for name, dir := range map[string]string{"tmpfs": tmpfs(t, 256), "disk": t.TempDir()} {
		for offset, threads := range map[uint64]int{0: 0, 4096: 1, 6 * mib: 3} {
			f := empty(t, dir)
			parts, err := other.CopyOut(t.Context(), memory, f, offset, threads, true)
			do(t, err)
			digested(t, parts, data)
			has(t, f, int64(offset), data)
			if size, most := stored(t, f), int64(38-8+6)*mib; offset%(2*mib) == 0 && size > most {
				t.Errorf("%s: %d bytes are stored, want %d at most: zeros are holes", name, size, most)
			}
			do(t, f.Truncate(0))
		}
	}
	f := empty(t, t.TempDir())
	_, err := f.WriteAt(noise(2, 50*mib), 0)
	do(t, err)
	_, err = other.CopyOut(t.Context(), memory, f, 4*mib, 0, true)
	do(t, err)
	has(t, f, 4*mib, data) // the zeros are written over what was there
}

// Memory is filled with ranges of several files, in more pieces and from more spans than a request takes.
func TestSoftMoverReadsSpans(t *testing.T) {
	dev := devices(t, 1)
	m := softMover(t, dev, nil)
	a, b := noise(3, 150*mib), noise(4, 150*mib, [2]int{0, 9})
	files := []*os.File{holding(t, a), holding(t, b)}
	var spans []Span
	var want []byte
	for at := uint64(0); at < 144*mib; at += 3 * mib {
		spans = append(spans, Span{File: files[0], Offset: at + 4096, Bytes: mib}, Span{Bytes: mib}, Span{File: files[1], Offset: at, Bytes: mib})
		want = append(want, a[at+4096:at+4096+mib]...)
		want = append(want, make([]byte, mib)...)
		want = append(want, b[at:at+mib]...)
	}
	memory, parts, err := m.CopyIn(t.Context(), softUUID(0), 2*mib, spans, 0)
	do(t, err)
	defer CloseMemory(memory)
	digested(t, parts, want)
	if len(memory) != 72 {
		t.Fatalf("%d pieces", len(memory))
	}
	f := empty(t, tmpfs(t, 256))
	parts, err = m.CopyOut(t.Context(), memory, f, 0, 0, true)
	do(t, err)
	digested(t, parts, want)
	has(t, f, 0, want)
	alone := empty(t, tmpfs(t, 256))
	if parts, err = m.CopyOut(t.Context(), memory, alone, 0, 0, false); err != nil || parts != nil {
		t.Errorf("a copy without kernels: %d bytes of digests, %v", len(parts), err)
	}
	has(t, alone, 0, want)
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", m.Pid()))
	do(t, err)
	if len(open) > 40 {
		t.Errorf("the helper has %d files open", len(open))
	}
}

func TestSoftMoverIsRefused(t *testing.T) {
	dev := devices(t, 1)
	m := softMover(t, dev, nil)
	data := noise(5, 16*mib)
	memory := filled(t, m, 0, 8*mib, data)
	out := func(memory []Memory, to *os.File) error {
		_, err := m.CopyOut(t.Context(), memory, to, 0, 0, true)
		return err
	}

	null, err := os.Open(os.DevNull)
	do(t, err)
	defer null.Close()
	refused(t, out([]Memory{memory[0], {File: null, Bytes: 8 * mib}}, empty(t, t.TempDir())), InvalidValue)
	refused(t, out([]Memory{{File: memory[0].File, Bytes: 16 * mib}}, empty(t, t.TempDir())), InvalidValue)

	for size, want := range map[int]error{8: syscall.ENOSPC, 20: nil} {
		if err := out(memory, empty(t, tmpfs(t, size))); !errors.Is(err, want) {
			t.Errorf("to a tmpfs of %d MiB: %v, want %v", size, err, want)
		}
	}
	if err := out(memory, null); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("to /dev/null: %v", err)
	}

	in := func(gpu string, spans ...Span) error {
		memory, _, err := m.CopyIn(t.Context(), gpu, 512*mib, spans, 0)
		if len(memory) > 0 {
			t.Errorf("with error %v there are %d pieces", err, len(memory))
		}
		return err
	}
	file := holding(t, data)
	if err := in(softUUID(0), Span{File: file, Bytes: 15 * mib}, Span{File: file, Offset: 14 * mib, Bytes: 3 * mib}); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("from a file that is too short: %v", err)
	}
	refused(t, in(softUUID(7), Span{Bytes: 2 * mib}), InvalidValue)
	refused(t, in(softUUID(0), Span{Bytes: 3 * mib}), InvalidValue)

	// What did not go leaves nothing on the GPU, and nothing that a later copy could trip over.
	before := unused(t, m)
	refused(t, in(softUUID(0), Span{Bytes: 4096 * mib}), OutOfMemory)
	if after := unused(t, m); after < before {
		t.Errorf("%d bytes are free, %d were", after, before)
	}
	f := empty(t, t.TempDir())
	do(t, out(memory, f))
	has(t, f, 0, data)
}

// unused returns the bytes of a GPU's memory that nobody uses.
func unused(t *testing.T, m *Mover) uint64 {
	t.Helper()
	info, err := m.helper.InfoNow(t.Context())
	do(t, err)
	return info.GPUs[0].Free
}

// The memory of a copy whose helper is killed is as it was, and another helper copies it.
func TestSoftMoverIsKilled(t *testing.T) {
	dev := devices(t, 1)
	slow := filepath.Join(t.TempDir(), "slow.conf")
	do(t, os.WriteFile(slow, []byte("out_delay_ms = 2000\n"), 0o600))
	m := softMover(t, dev, func(o *Options) { o.Env = append(o.Env, "SOFTCUDA_CONF="+slow) })
	data := noise(6, 64*mib)
	memory := filled(t, m, 0, 16*mib, data)
	f := empty(t, tmpfs(t, 128))
	time.AfterFunc(500*time.Millisecond, m.Kill)
	_, err := m.CopyOut(t.Context(), memory, f, 0, 1, true)
	wants(t, err, ErrHelperGone)
	_, err = softMover(t, dev, nil).CopyOut(t.Context(), memory, f, 0, 0, true)
	do(t, err)
	has(t, f, 0, data)
}
