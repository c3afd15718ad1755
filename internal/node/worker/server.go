// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package worker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/fault"
)

// FD is the worker's end of the socket pair.
const FD = 3

// ErrNotWorker says that this process was not started as a worker.
var ErrNotWorker = errors.New("file descriptor 3 is not gpuckpt's socket: this program is started by gpuckpt, not by hand")

// Server is the worker's side: it receives requests and sends their answers.
type Server struct {
	sock *os.File
	most int
	mu   sync.Mutex // one frame is written at a time
}

// NewServer returns the server of this process, whose messages have at most so many bytes.
func NewServer(most int) (*Server, error) {
	if kind, err := unix.GetsockoptInt(FD, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_STREAM {
		return nil, ErrNotWorker
	}
	unix.CloseOnExec(FD)
	return &Server{sock: os.NewFile(FD, "socket"), most: most}, nil
}

// Next waits for the next request, whose files are the caller's. The error is io.EOF when the client's
// end is closed.
func (s *Server) Next() (Message, error) {
	m, err := readFrame(s.sock, s.most)
	if errors.Is(err, unix.ECONNRESET) || errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return m, err
}

// Answer answers a request. The client gets files of its own. A client that is gone wants no answer:
// that is no error.
func (s *Server) Answer(id uint64, answer any, files ...*os.File) error {
	body, err := encode(answer, s.most)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = writeFrame(s.sock, id, body, files)
	return nil
}

// Serve is a worker's whole life: it answers one request after the other until its client is gone.
func Serve(most int, answer func(body []byte) any) {
	s, err := NewServer(most)
	for err == nil {
		var m Message
		if m, err = s.Next(); err == nil {
			err = s.Answer(m.ID, answer(m.Body))
			m.Close()
		}
	}
	if errors.Is(err, io.EOF) {
		os.Exit(0)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// LongOrder bounds an order that moves all GPU state: 64 GiB at 40 MB/s. ShortOrder bounds one that
// moves nothing.
const (
	LongOrder  = 30 * time.Minute
	ShortOrder = time.Minute
)

// outcome is the answer to an order. Some results come with an error.
type outcome[R any] struct {
	Error  string `json:"error,omitempty"`
	Result R      `json:"result"`
}

// Order has a worker that runs Obey carry out an order, and kills it when the order takes longer than
// within. It is not given up halfway: nobody would know what it has done. The result is the worker's, also after an error of the order itself.
//
//nolint:contextcheck // see above
func Order[R any](w *Worker, doing string, order any, within time.Duration) (R, error) {
	var a outcome[R]
	if err := w.Call(context.Background(), doing, order, &a, Limit{Most: fault.Bound(within)}); err != nil {
		return *new(R), err
	}
	if a.Error != "" {
		return a.Result, fmt.Errorf("%s: %s", doing, a.Error)
	}
	return a.Result, nil
}

// Obey is the whole life of a worker that carries out orders of the type O, one by one.
func Obey[O, R any](kind Kind, do func(O) (R, error)) {
	Serve(kind.MaxMessage, func(body []byte) any {
		var order O
		var a outcome[R]
		err := Decode(body, &order)
		if err == nil {
			a.Result, err = do(order)
		}
		if err != nil {
			a.Error = err.Error()
		}
		return a
	})
}
