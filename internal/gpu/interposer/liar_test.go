// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package interposer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// liar is an interposer in this process. It answers as an honest one of some pieces of GPU memory, but for what lie
// changes: a word of the control block, or a result.
type liar struct {
	*Interposer
	t      *testing.T
	block  []byte
	mu     sync.Mutex
	memory []int // descriptors of pieces of pieceBytes
	offset int   // of what was offered
	taken  uint32
	pair   [2]int // of the last meet: the first is the liar's
	// lie is called after each honest answer to a request, with the result.
	lie func(l *liar, what uint32, result *uint32)
}

const pieceBytes = 4 << 20

// lying has a liar answer until the test ends.
func lying(t *testing.T, pieces int, lie func(l *liar, what uint32, result *uint32)) *liar {
	t.Helper()
	l := &liar{t: t, block: mapped(t), pair: [2]int{-1, -1}, lie: lie}
	usesCUDA(t)
	for range pieces {
		fd, err := unix.MemfdCreate("piece", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		l.memory = append(l.memory, fd)
		if err := unix.Ftruncate(fd, pieceBytes); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	if l.Interposer, err = Find(os.Getpid()); l.Interposer == nil || err != nil {
		t.Fatal(l.Interposer, err)
	}
	over, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-over:
				return
			case <-time.After(20 * time.Microsecond):
				l.answer()
			}
		}
	}()
	t.Cleanup(func() {
		close(over)
		<-done
		for _, fd := range append(l.memory, l.pair[:]...) {
			_ = unix.Close(fd) // or it was never open
		}
	})
	return l
}

// usesCUDA has this process taken for one that uses CUDA.
func usesCUDA(t *testing.T) {
	t.Helper()
	name := filepath.Join(t.TempDir(), "libcuda.so.1")
	if err := os.WriteFile(name, make([]byte, 4096), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(page) })
}

func (l *liar) set(at int, value uint32)   { binary.LittleEndian.PutUint32(l.block[at:], value) }
func (l *liar) set64(at int, value uint64) { binary.LittleEndian.PutUint64(l.block[at:], value) }
func (l *liar) word(at int) uint32         { return binary.LittleEndian.Uint32(l.block[at:]) }
func (l *liar) bytes() uint64              { return uint64(len(l.memory)) * pieceBytes }

func (l *liar) answer() {
	l.mu.Lock()
	defer l.mu.Unlock()
	request, result := l.word(offRequest), uint32(0)
	if request == l.word(offAnswered) {
		return
	}
	switch request % asks {
	case askPark:
		l.set(offState, uint32(parked))
		l.set64(offBytes, l.bytes())
		l.offset, l.taken = 0, 0
	case askKeep:
		some := l.memory[l.offset:min(l.offset+batch, len(l.memory))]
		for i, fd := range some {
			l.set(offDescriptors+4*i, uint32(fd))
			l.set64(offSizes+8*i, pieceBytes)
		}
		l.set(offCount, uint32(len(some)))
		l.offset += len(some)
	case askSave, askRelease:
		l.set(offState, uint32(saved))
		l.set64(offStart, 1<<40)
		l.set64(offBytes, l.bytes())
	case askMeet:
		l.closePair()
		if err := socketPair(&l.pair); err != nil {
			l.t.Error(err)
		}
		l.set(offDescriptors, uint32(l.pair[1]))
		l.set(offCount, l.taken)
	case askTake:
		l.taken += l.receive()
		l.set(offCount, l.taken)
	case askReturn, askBack:
		l.set(offState, uint32(parked))
	case askOpen:
		l.set(offState, uint32(open))
	}
	l.lie(l, request%asks, &result)
	l.set(offResult, result)
	l.set(offAnswered, request)
}

// hangUp closes the pair of sockets. No answer is under way then.
func (l *liar) hangUp() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closePair()
}

func (l *liar) closePair() {
	for i, fd := range l.pair {
		_ = unix.Close(fd)
		l.pair[i] = -1
	}
}

func socketPair(pair *[2]int) (err error) {
	*pair, err = unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	return err
}

// receive takes a message, and returns how many descriptors it has.
func (l *liar) receive() uint32 {
	data, rights := make([]byte, 8*batch), make([]byte, unix.CmsgSpace(4*batch))
	_, n, _, _, err := unix.Recvmsg(l.pair[0], data, rights, unix.MSG_DONTWAIT|unix.MSG_CMSG_CLOEXEC)
	if err != nil {
		return 0
	}
	messages, err := unix.ParseSocketControlMessage(rights[:n])
	if err != nil || len(messages) != 1 {
		return 0
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return 0
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	return uint32(len(fds))
}

// idle is a mover that copies nothing.
type idle struct{}

func (idle) CopyOut(context.Context, []cuda.Memory, *os.File) (cuda.Parts, error) { return nil, nil }
func (idle) Kill()                                                                {}
func (idle) Close() error                                                         { return nil }

// checkpointed takes a liar through a checkpoint that leaves it running, and returns what failed first.
func checkpointed(t *testing.T) (err error) {
	t.Helper()
	self := cuda.Group{{PID: cuda.PID{Host: os.Getpid(), NS: os.Getpid()}}}
	first := func(e error) {
		if err == nil {
			err = e
		}
	}
	var areas []*os.File
	defer func() {
		for _, f := range areas {
			f.Close()
		}
	}()
	p, perr := Park(t.Context(), self, time.Minute)
	first(perr)
	if p != nil && p.refusal == nil {
		_, serr := p.save(t.Context(), &Keeper{
			Mover: func(context.Context) (Mover, error) { return idle{}, nil },
			File: func(_ int, bytes uint64) (*os.File, error) {
				f, err := os.CreateTemp(t.TempDir(), "")
				if err != nil {
					return nil, err
				}
				areas = append(areas, f)
				return f, f.Truncate(int64(bytes))
			},
			Undo: func() {},
		})
		first(serr)
		if k := p.Kept(); k != nil {
			k.Want()
			_, werr := k.Wait(t.Context())
			first(werr)
			k.InArea()
		}
	}
	first(p.Open(t.Context(), self))
	p.Kept().Close()
	p.Forget()
	return err
}

// soon fails the test if something takes long: nothing that an interposer answers at once may.
func soon(t *testing.T, do func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); do() }()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		t.Fatal("it goes on and on")
	}
}

// noneLeft returns what fails the test if this process has more descriptors than before.
func noneLeft(t *testing.T) func() {
	t.Helper()
	count := func() int {
		files, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(files)
	}
	before := count()
	return func() {
		t.Helper()
		for began := time.Now(); count() > before; time.Sleep(time.Millisecond) {
			runtime.GC() // which closes what is left to it
			if time.Since(began) > 10*time.Second {
				t.Fatalf("there are %d descriptors, and were %d", count(), before)
			}
		}
	}
}

func TestHonest(t *testing.T) {
	for _, pieces := range []int{1, batch, batch + 1, 100} {
		t.Run(fmt.Sprint(pieces), func(t *testing.T) {
			l := lying(t, pieces, func(*liar, uint32, *uint32) {})
			none := noneLeft(t)
			if err := checkpointed(t); err != nil {
				t.Error(err)
			}
			l.hangUp()
			if int(l.taken) != pieces {
				t.Errorf("it was given %d pieces back", l.taken)
			}
			none()
		})
	}
}

// lingering returns a TCP socket with bytes that nobody takes, whose last close waits for them.
func lingering(t *testing.T) int {
	t.Helper()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { server.Close() })
	conn, err := net.Dial("tcp", server.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	f, err := conn.(*net.TCPConn).File() // which blocks
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd, err := unix.FcntlInt(f.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600})
	}
	for err == nil {
		_, err = unix.SendmsgN(fd, make([]byte, 1<<16), nil, nil, unix.MSG_DONTWAIT)
	}
	if !errors.Is(err, unix.EAGAIN) {
		t.Fatal(err)
	}
	return fd
}

// What an interposer offers that is no GPU memory is refused, and all that was taken is given up.
func TestOffers(t *testing.T) {
	const none = 1 << 20
	plain, err := os.Open("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	dir, err := os.Open("/")
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	memfd := func(l *liar) uint32 { return uint32(l.memory[0]) }
	is := func(fd uint32) func(*liar) uint32 { return func(*liar) uint32 { return fd } }
	for _, test := range []struct {
		name  string
		count uint32
		fd    func(*liar) uint32
		size  uint64
		want  string
	}{
		{"more than a batch", batch + 1, memfd, pieceBytes, "offers 33 descriptors"},
		{"more than there are numbers", 1<<32 - 1, memfd, pieceBytes, "offers 4294967295 descriptors"},
		{"without end", batch, memfd, pieceBytes, "offers more than 100 pieces"},
		{"a descriptor that it has not", 1, is(none), pieceBytes, "take a descriptor"},
		{"a descriptor that nobody has", 1, is(1<<32 - 1), pieceBytes, "take a descriptor"},
		{"a plain file", 1, is(uint32(plain.Fd())), pieceBytes, "of another kind"},
		{"a directory", 1, is(uint32(dir.Fd())), pieceBytes, "of another kind"},
		{"a pipe", 1, is(uint32(w.Fd())), pieceBytes, "of another kind"},
		{"no bytes", 1, memfd, 0, "offers 0 bytes"},
		{"a part of a page", 1, memfd, 4095, "offers 4095 bytes"},
		{"bytes beyond all files", 1, memfd, 1 << 63, "offers 9223372036854775808 bytes"},
		{"all bytes", 2, memfd, 1<<64 - pieceUnit, "offers 18446744073707454464 bytes"},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := lying(t, 1, func(l *liar, what uint32, _ *uint32) {
				if what == askKeep {
					for i := range int(min(test.count, batch)) {
						l.set(offDescriptors+4*i, test.fd(l))
						l.set64(offSizes+8*i, test.size)
					}
					l.set(offCount, test.count)
				}
			})
			none := noneLeft(t)
			soon(t, func() {
				m := &kept{Interposer: l.Interposer}
				if err := m.export(t.Context(), 100); err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("got %v, want %q", err, test.want)
				}
				m.close()
			})
			none()
		})
	}

	t.Run("a socket that waits at its end", func(t *testing.T) {
		fd := lingering(t)
		l := lying(t, 1, func(l *liar, what uint32, _ *uint32) {
			if what == askKeep {
				l.set(offDescriptors, uint32(fd))
			}
		})
		soon(t, func() {
			m := &kept{Interposer: l.Interposer}
			// The program has closed its own as soon as it is taken, as far as who takes it can tell.
			kinds := 0
			_, err := m.ask(t.Context(), "keep", askKeep, 0, patience)
			if err == nil {
				_, err = m.descriptors(1, func(taken int) bool {
					kinds++
					unix.Close(fd)
					return mayBeMemory(taken)
				})
			}
			if err == nil || kinds != 1 || !strings.Contains(err.Error(), "of another kind") {
				t.Errorf("got %v", err)
			}
		})
	})

	t.Run("slowly", func(t *testing.T) {
		l := lying(t, 1, func(l *liar, what uint32, _ *uint32) {
			time.Sleep(10 * time.Millisecond)
			l.offset = 0
		})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		soon(t, func() {
			m := &kept{Interposer: l.Interposer}
			if err := m.export(ctx, maxPieces); ctx.Err() == nil {
				t.Errorf("it ended before its time: %v", err)
			}
			m.close()
		})
	})
}

// An interposer that lies about what it has back gets an error, and the rest of its memory is given up with it.
func TestLies(t *testing.T) {
	count := func(n uint32) func(*liar, *uint32) { return func(l *liar, _ *uint32) { l.set(offCount, n) } }
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	offers := func(fd func() int) func(*liar, *uint32) {
		return func(l *liar, _ *uint32) { l.set(offDescriptors, uint32(fd())) }
	}
	for _, test := range []struct {
		name string
		what uint32
		lie  func(l *liar, result *uint32)
		want string
	}{
		{"takes none", askTake, count(0), "has taken 0 pieces of its GPU memory, and was given 32"},
		{"takes one", askTake, count(1), "has taken 1 pieces"},
		{"takes more than it was given", askTake, count(33), "has taken 33 pieces"},
		{"takes all that can be counted", askTake, count(1<<32 - 1), "has taken 4294967295 pieces"},
		{"releases less", askRelease, func(l *liar, _ *uint32) { l.set64(offBytes, 1) }, "has released 1 bytes"},
		{"releases more", askRelease, func(l *liar, _ *uint32) { l.set64(offBytes, 1<<64-1) }, "has released 18446744073709551615 bytes"},
		{"meets by a pipe", askMeet, offers(func() int { return int(w.Fd()) }), "of another kind"},
		{"meets by memory", askMeet, func(l *liar, _ *uint32) { l.set(offDescriptors, uint32(l.memory[0])) }, "of another kind"},
		{"meets by nothing", askMeet, offers(func() int { return 1 << 20 }), "take a descriptor"},
		{"hangs up", askMeet, func(l *liar, _ *uint32) { unix.Shutdown(l.pair[0], unix.SHUT_RDWR) }, "broken pipe"},
		{"hears nothing", askMeet, func(l *liar, _ *uint32) {
			for unix.Sendto(l.pair[1], make([]byte, 1<<12), unix.MSG_DONTWAIT, nil) == nil {
			}
		}, "resource temporarily unavailable"},
		{"is refused", askTake, func(_ *liar, result *uint32) { *result = 1 }, "answers its interposer with error 1"},
		{"has no room, always", askTake, func(_ *liar, result *uint32) { *result = outOfMemory }, "answers its interposer with error 2"},
		{"has its memory elsewhere, always", askPark, func(_ *liar, result *uint32) { *result = notPermitted }, errElsewhere.Error()},
		{"cannot return", askReturn, func(_ *liar, result *uint32) { *result = 999 }, "error 999"},
	} {
		t.Run(test.name, func(t *testing.T) {
			l := lying(t, batch+1, func(l *liar, what uint32, result *uint32) {
				if what == test.what {
					test.lie(l, result)
				}
			})
			none := noneLeft(t)
			soon(t, func() {
				if err := checkpointed(t); err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("got %v, want %q", err, test.want)
				}
			})
			l.hangUp()
			none()
		})
	}
}

// A container's interposers come and go, each time that they are asked to park: first there is one, then there are two,
// then one again.
func TestComesAndGoes(t *testing.T) {
	const other = "GPUCKPT_TEST_LIAR" // a process that does what it is told
	refuses := func(_ *liar, _ uint32, result *uint32) { *result = notPermitted }
	if os.Getenv(other) != "" {
		l, order := lying(t, 1, refuses), make([]byte, 1)
		tid := l.word(offTID)
		for {
			if n, err := unix.Read(3, order); n == 0 || err != nil {
				return
			}
			l.set(offTID, tid*uint32(order[0]))
			if _, err := unix.Write(3, order); err != nil {
				t.Fatal(err)
			}
		}
	}
	var pair [2]int
	if err := socketPair(&pair); err != nil {
		t.Fatal(err)
	}
	far := os.NewFile(uintptr(pair[1]), "")
	defer far.Close()
	cmd := exec.Command("/proc/self/exe", "-test.run", "^TestComesAndGoes$")
	cmd.Env, cmd.ExtraFiles = append(os.Environ(), other+"=1"), []*os.File{far}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		unix.Close(pair[0])
		cmd.Wait()
	})
	tell := func(here byte) {
		order := []byte{here}
		if _, err := unix.Write(pair[0], order); err != nil {
			t.Error(err)
		}
		if _, err := unix.Read(pair[0], order); err != nil {
			t.Error(err)
		}
	}
	tell(0)
	parks, over := atomic.Int32{}, atomic.Bool{}
	lying(t, 1, func(l *liar, what uint32, result *uint32) {
		refuses(l, what, result)
		if what == askPark && !over.Load() {
			tell(byte(parks.Add(1) % 2))
		}
	})
	self, there := cuda.Process{PID: cuda.PID{Host: os.Getpid()}}, cuda.Process{PID: cuda.PID{Host: cmd.Process.Pid}}
	soon(t, func() {
		if _, err := Park(t.Context(), cuda.Group{self, there}, time.Minute); !errors.Is(err, errElsewhere) {
			t.Errorf("parked: %v", err)
		}
	})
	over.Store(true)
	if n := parks.Load(); n != 2 {
		t.Errorf("it was asked to park %d times", n)
	}
}

// A program has its interposer's library mapped as often as it likes: it is searched for a control block in the first ones.
func TestManyMappings(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), LibraryName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(8192); err != nil {
		t.Fatal(err)
	}
	var last []byte                   // by address
	for i := range 10 * maxMappings { // apart from each other, as every second page of the file
		page, err := unix.Mmap(int(f.Fd()), int64(i%2)*4096, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Munmap(page) })
		if last == nil || uintptr(unsafe.Pointer(&page[0])) > uintptr(unsafe.Pointer(&last[0])) {
			last = page
		}
	}
	copy(last, magic)
	binary.LittleEndian.PutUint32(last[offVersion:], version)
	binary.LittleEndian.PutUint32(last[offTID:], uint32(os.Getpid()))
	if c, err := Find(os.Getpid()); c != nil || err != nil {
		t.Errorf("found %v, %v", c, err)
	}
}

// words are values of the control block that a program may have put there.
var words = []uint64{0, 1, 2, 3, 4, batch, batch + 1, 1<<31 - 1, 1 << 31, 1<<32 - 1, pieceBytes, maxPiece, 1 << 62, 1 << 63, 1<<64 - pieceBytes, 1<<64 - 1}

// fields are what it can lie in. Who changes requests is not answered at all, for ten minutes.
var fields = []struct {
	at   int
	wide bool
}{
	{offResult, false}, {offState, false}, {offSharing, false}, {offCount, false}, {offPeers, false},
	{offBytes, true}, {offStart, true}, {offSizes, true}, {offDescriptors, false}, {offInArea, false}, {offTID, false}, {offVersion, false}, {offCopiers, false},
}

var results = []uint32{0, 1, outOfMemory, illegalState, notFound, notReady, notPermitted}

// tell has a liar put a value into a field.
func (l *liar) tell(field, value byte, result *uint32) {
	f := fields[int(field)%len(fields)]
	switch {
	case f.at == offResult:
		*result = results[int(value)%len(results)]
	case f.wide:
		l.set64(f.at, words[int(value)%len(words)])
	default:
		l.set(f.at, uint32(words[int(value)%len(words)]))
	}
}

// The words of a control block change at random, with every answer and between them.
func TestRestless(t *testing.T) {
	l := lying(t, batch+3, func(l *liar, _ uint32, result *uint32) {
		for range rand.IntN(3) {
			l.tell(byte(rand.Uint32()), byte(rand.Uint32()), result)
		}
	})
	tid := l.word(offTID)
	none := noneLeft(t)
	for range 100 {
		soon(t, func() { _ = checkpointed(t) })
		time.Sleep(time.Millisecond) // the last answer is there
		l.set(offTID, tid)
		l.set(offVersion, version)
		l.set(offCopiers, 0)
	}
	l.hangUp()
	none()
}

// FuzzLiar takes an interposer through a checkpoint that lies at each answer: a byte that says in how many fields, and two
// for each field. It costs neither much time nor a descriptor.
func FuzzLiar(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 0, 1, 3, 6, 0, 0, 0})       // too many descriptors
	f.Add([]byte{0, 1, 7, 12})                  // a size
	f.Add([]byte{0, 0, 0, 1, 5, 1})             // what is released
	f.Add([]byte{0, 0, 0, 0, 1, 8, 7})          // a socket that is none
	f.Add([]byte{0, 0, 0, 0, 0, 1, 3, 0})       // takes none
	f.Add([]byte{1, 2, 3, 1, 2, 3, 1, 2, 4})    // shares
	f.Add([]byte{2, 0, 5, 2, 7, 2, 0, 1, 1, 4}) // errors, states
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 512 {
			return
		}
		next := func() (b byte) {
			if len(data) > 0 {
				b, data = data[0], data[1:]
			}
			return b
		}
		l := lying(t, 3, func(l *liar, _ uint32, result *uint32) {
			for range next() % 4 {
				l.tell(next(), next(), result)
			}
		})
		none := noneLeft(t)
		soon(t, func() { _ = checkpointed(t) })
		time.Sleep(100 * time.Microsecond)
		l.hangUp()
		none()
	})
}
