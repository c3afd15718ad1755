// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
)

// drain is how long calls under way may go on after the client has gone.
const drain = 2 * time.Minute

// Serve answers the requests that come in on file descriptor 3 until the
// client closes it. An error is a broken socket or a client that speaks
// otherwise; nothing more can be served then.
func Serve() error {
	kind, err := unix.GetsockoptInt(wire.FD, unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil || kind != unix.SOCK_SEQPACKET {
		return errors.New("file descriptor 3 is not gpuckpt's socket: this program is started by gpuckpt, not by hand")
	}
	unix.CloseOnExec(wire.FD)
	s := &server{opened: make(chan struct{}), facts: sync.OnceValue(readFacts), last: map[int]chan struct{}{}}
	go func() {
		s.fault = open()
		close(s.opened)
	}()
	err = s.receive()
	done := make(chan struct{})
	go func() {
		s.calls.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(drain):
		return errors.Join(err, fmt.Errorf("client is gone and the driver did not end its calls within %v", drain))
	}
	return err
}

type server struct {
	opened chan struct{} // closed once the driver is loaded; fault is then set
	fault  *wire.Reply   // nil, or the answer to everything
	facts  func() facts  // read once, when first asked for

	calls sync.WaitGroup
	last  map[int]chan struct{} // by pid: closed when its newest call has ended
}

// receive starts a call for each request.
func (s *server) receive() error {
	buf := make([]byte, wire.MaxMessage+1)
	for {
		n, err := unix.Read(wire.FD, buf)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECONNRESET || n == 0: // the client is gone
			return nil
		case err != nil:
			return fmt.Errorf("receive request: %w", err)
		}
		q, err := wire.DecodeRequest(buf[:n])
		if err != nil {
			return err
		}
		before, done := s.last[q.PID], make(chan struct{})
		if q.PID != 0 {
			s.last[q.PID] = done
		}
		s.calls.Add(1)
		go func() {
			defer s.calls.Done()
			defer close(done)
			if before != nil {
				<-before
			}
			s.answer(q)
		}()
	}
}

func (s *server) answer(q wire.Request) {
	if q.Op == wire.OpInfo && !q.Fresh {
		go s.facts() // while the driver is being loaded
	}
	<-s.opened
	var r wire.Reply
	if q.Op == wire.OpSurvey {
		r = survey() // NVML's, not CUDA's: it tells of drivers that CUDA refuses
	} else if s.fault != nil {
		r = *s.fault
	} else {
		r = serve(q, s.facts)
	}
	r.ID = q.ID
	b, err := wire.Encode(r)
	if err != nil { // only a machine with hundreds of GPUs
		b, _ = wire.Encode(wire.Reply{ID: q.ID, Code: 999, Text: err.Error()})
	}
	// A client that is gone wants no reply.
	for unix.Send(wire.FD, b, unix.MSG_NOSIGNAL) == unix.EINTR {
	}
}
