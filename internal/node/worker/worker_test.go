// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// behaviour makes the test's executable a worker that does as its value says.
const behaviour = "GPUCKPT_TEST_WORKER"

const most = 1 << 20

// echo is a request, and its answer.
type echo struct {
	Text string `json:"text"`
}

func TestMain(m *testing.M) {
	switch os.Getenv(behaviour) {
	case "echo":
		Serve(most, func(body []byte) any {
			var e echo
			if err := Decode(body, &e); err != nil {
				e.Text = err.Error()
			}
			return e
		})
	case "files": // come back in the other order
		s, err := NewServer(most)
		for err == nil {
			var m Message
			if m, err = s.Next(); err != nil {
				break
			}
			var e echo
			if err = Decode(m.Body, &e); e.Text == "slowly" {
				time.Sleep(500 * time.Millisecond)
			}
			slices.Reverse(m.Files)
			err = errors.Join(err, s.Answer(m.ID, e, m.Files...))
			m.Close()
		}
		os.Exit(0)
	case "stay":
		time.Sleep(time.Hour)
	case "half":
		unix.Write(FD, []byte{9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, '{'})
		os.Exit(3)
	case "long":
		unix.Write(FD, []byte{0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0})
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

var (
	errGone    = errors.New("gone")
	errHung    = errors.New("hung")
	errGarbled = errors.New("garbled")
)

// start starts a worker that ends with the test.
func start(t *testing.T, how string) *Worker {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), behaviour+"="+how)
	w, err := Start(Kind{Name: "test", Gone: errGone, Hung: errHung, Garbled: errGarbled, MaxMessage: most}, cmd, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		w.Kill()
		w.Close()
	})
	return w
}

// ask calls a worker with a text, and returns the answer's.
func ask(t *testing.T, w *Worker, text string) (string, error) {
	t.Helper()
	var e echo
	err := w.Call(t.Context(), "ask", echo{text}, &e, Limit{Most: 20 * time.Second})
	return e.Text, err
}

func TestMessagesArriveWhole(t *testing.T) {
	w := start(t, "echo")
	for _, text := range []string{"", "a word", strings.Repeat("long ", most/6)} {
		if got, err := ask(t, w, text); err != nil || got != text {
			t.Errorf("%d bytes came back as %d, %v", len(text), len(got), err)
		}
	}
	if _, err := ask(t, w, strings.Repeat("x", most)); err == nil {
		t.Error("a message longer than MaxMessage was sent")
	}
	if _, err := ask(t, w, "still"); err != nil {
		t.Error(err)
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if _, err := ask(t, w, "closed"); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestAnswersThatMakeNoSense(t *testing.T) {
	for how, want := range map[string]error{"half": errGone, "long": errGarbled} {
		w := start(t, how)
		if _, err := ask(t, w, "?"); !errors.Is(err, want) {
			t.Errorf("%s: got %v, want %v", how, err, want)
		}
		<-w.Done()
	}
	var e echo
	w := start(t, "echo")
	if err := w.Call(t.Context(), "ask", echo{"x"}, &struct{ Other int }{}, Limit{Most: time.Minute}); !errors.Is(err, errGarbled) {
		t.Errorf("an unknown field: %v", err)
	}
	if err := w.Call(t.Context(), "ask", echo{"x"}, &e, Limit{Most: time.Minute}); !errors.Is(err, errGarbled) || w.Alive() {
		t.Errorf("after an unknown field: %v, alive: %v", err, w.Alive())
	}
}

func TestWorkerThatStaysIsKilled(t *testing.T) {
	w := start(t, "stay")
	if err := w.reap(50 * time.Millisecond); err == nil || !strings.Contains(err.Error(), "was killed") {
		t.Errorf("got %v", err)
	}
	<-w.Done()
}

func TestCallThatTakesTooLong(t *testing.T) {
	w := start(t, "stay")
	err := w.Call(t.Context(), "ask", echo{}, &echo{}, Limit{Most: 50 * time.Millisecond})
	if !errors.Is(err, errHung) || !strings.Contains(err.Error(), "ask took longer than 50ms") {
		t.Errorf("got %v", err)
	}
	<-w.Done()
}

// A call ends when nothing has moved for a while, and not before: neither while something moves, nor
// where that cannot be told. Its whole time is bounded all the same.
func TestCallInWhichNothingMoves(t *testing.T) {
	const still, moves = 80 * time.Millisecond, 400 * time.Millisecond
	for _, c := range []struct {
		name  string
		most  time.Duration
		moved func(since time.Duration) (uint64, bool)
		least time.Duration
		says  string
	}{
		{"nothing moves", time.Minute, func(time.Duration) (uint64, bool) { return 7, true }, still, "nothing has moved for 80ms in ask"},
		{"it moves at first", time.Minute, func(d time.Duration) (uint64, bool) { return uint64(min(d, moves)), true }, moves, "nothing has moved for 80ms in ask"},
		{"it is not known at first", time.Minute, func(d time.Duration) (uint64, bool) { return 0, d > moves }, moves, "nothing has moved for 80ms in ask"},
		{"it moves for ever", moves, func(d time.Duration) (uint64, bool) { return uint64(d), true }, moves, "ask took longer than 400ms"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			w, began := start(t, "stay"), time.Now()
			limit := Limit{Most: c.most, Still: still, Moved: func() (uint64, bool) { return c.moved(time.Since(began)) }}
			err := w.Call(t.Context(), "ask", echo{}, &echo{}, limit)
			if !errors.Is(err, errHung) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v", err)
			}
			if took := time.Since(began); took < c.least {
				t.Errorf("it ended after %v, want %v at least", took, c.least)
			}
			<-w.Done()
		})
	}
	w := start(t, "echo")
	var e echo
	const answered = 2 * time.Second // a busy machine's answer takes a while
	limit := Limit{Most: time.Minute, Still: answered, Moved: func() (uint64, bool) { return 0, true }}
	if err := w.Call(t.Context(), "ask", echo{"x"}, &e, limit); err != nil || e.Text != "x" {
		t.Errorf("an answer: %q, %v", e.Text, err)
	}
	time.Sleep(answered + answered/looks)
	if _, err := ask(t, w, "later"); err != nil {
		t.Errorf("after a call whose time is over: %v", err)
	}
}

func TestKilledAndCancelled(t *testing.T) {
	w := start(t, "stay")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- w.Call(ctx, "ask", echo{}, &echo{}, Limit{Most: time.Minute}) }()
	for w.Pending() != 1 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) || !w.Alive() {
		t.Errorf("cancelled: %v, alive: %v", err, w.Alive())
	}
	go func() { ended <- w.Call(context.Background(), "ask", echo{}, &echo{}, Limit{Most: time.Minute}) }()
	for w.Pending() != 2 {
		time.Sleep(time.Millisecond)
	}
	w.Kill()
	if err := <-ended; !errors.Is(err, errGone) || !strings.Contains(err.Error(), "signal: killed") {
		t.Errorf("killed: %v", err)
	}
}

// A worker whose socket is closed on this side is of no more use, and is killed.
func TestSocketIsClosed(t *testing.T) {
	w := start(t, "stay")
	w.sock.Close()
	if _, err := ask(t, w, "?"); !errors.Is(err, errGone) {
		t.Errorf("got %v", err)
	}
	<-w.Done()
}

func TestTheEndOfStderrIsKept(t *testing.T) {
	s := new(tail)
	for range 1000 {
		s.Write([]byte("a line like others\n"))
	}
	s.Write([]byte("the last\n"))
	if got := s.String(); got != "a line like others | a line like others | a line like others | the last" {
		t.Errorf("kept %q", got)
	}
}

func FuzzReadFrame(f *testing.F) {
	f.Add([]byte{2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, '{', '}'})
	f.Add([]byte("\x7fELF and so on"))
	f.Fuzz(func(t *testing.T, b []byte) {
		near, far := pair(t)
		go func() {
			far.Write(b)
			far.Close()
		}()
		m, err := readFrame(near, 64)
		near.Close() // ends the writer
		if err != nil {
			return
		}
		from, to := pair(t)
		if err := writeFrame(to, m.ID, m.Body, nil); err != nil {
			t.Fatal(err)
		}
		to.Close()
		again, err := io.ReadAll(from)
		if err != nil || !bytes.HasPrefix(b, again) {
			t.Errorf("%v became %v, %v", b, again, err)
		}
	})
}

// pair returns two ends of a socket.
func pair(t *testing.T) (near, far *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.SetNonblock(fds[0], true) // so that deadlines work
	near, far = os.NewFile(uintptr(fds[0]), "near"), os.NewFile(uintptr(fds[1]), "far")
	t.Cleanup(func() {
		near.Close()
		far.Close()
	})
	return near, far
}

// withText returns a file with a text.
func withText(t *testing.T, text string) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if _, err := f.WriteString(text); err != nil {
		t.Fatal(err)
	}
	return f
}

func TestFilesGoWithTheirMessages(t *testing.T) {
	w := start(t, "files")
	for _, count := range []int{0, 1, MaxFiles} {
		var send []*os.File
		for i := range count {
			send = append(send, withText(t, fmt.Sprint("file ", i)))
		}
		var e echo
		// A message that does not fit into the socket at once.
		got, err := w.CallFiles(t.Context(), "swap", echo{strings.Repeat("x", most/2)}, send, &e, Limit{Most: 20 * time.Second})
		if err != nil || len(got) != count || len(e.Text) != most/2 {
			t.Fatalf("%d files went, %d came back with %d bytes: %v", count, len(got), len(e.Text), err)
		}
		for i, f := range got {
			text := make([]byte, 20)
			n, _ := f.ReadAt(text, 0)
			if want := fmt.Sprint("file ", count-1-i); string(text[:n]) != want {
				t.Errorf("file %d of %d has %q, want %q", i, count, text[:n], want)
			}
			f.Close()
		}
	}
	if _, err := w.CallFiles(t.Context(), "swap", echo{}, make([]*os.File, MaxFiles+1), &echo{}, Limit{Most: time.Second}); err == nil {
		t.Error("more files than a message carries were sent")
	}
}

// Files of an answer that nobody waits for are closed: the other end of a socket sees it.
func TestFilesThatNobodyWants(t *testing.T) {
	w := start(t, "files")
	for _, gone := range []bool{false, true} {
		near, far := pair(t)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		if gone {
			time.AfterFunc(100*time.Millisecond, cancel)
		}
		var err error
		if gone {
			_, err = w.CallFiles(ctx, "swap", echo{"slowly"}, []*os.File{far}, &echo{}, Limit{Most: 20 * time.Second})
		} else {
			_, err = w.CallFiles(ctx, "swap", echo{"garbage"}, []*os.File{far}, &struct{}{}, Limit{Most: 20 * time.Second})
			w = start(t, "files") // it was killed for it
		}
		if err == nil {
			t.Fatalf("gone %v: no error", gone)
		}
		far.Close()
		near.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := near.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("gone %v: the file is still open: %d, %v", gone, n, err)
		}
	}
}
