// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package driver

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/cuda/internal/wire"
	"github.com/gpuckpt/gpuckpt/internal/node/worker"
)

// drain is how long calls under way may go on after the client has gone.
const drain = 2 * time.Minute

// Serve answers the requests of its client until the client closes its end of the socket. An error
// is a broken socket or a client that speaks otherwise: nothing more can be served.
func Serve() error {
	client, err := worker.NewServer(wire.MaxMessage)
	if err != nil {
		return err
	}
	s := &server{client: client, loaded: make(chan struct{}), opened: make(chan struct{}), facts: sync.OnceValue(readFacts), last: map[int]chan struct{}{}}
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
	client    *worker.Server
	loaded    chan struct{} // closed once the driver is loaded; loadFault is then set
	loadFault *wire.Reply   // nil, or the answer to everything
	opened    chan struct{} // closed once the driver is initialised; fault is then set
	fault     *wire.Reply   // nil, or the answer to what needs that
	facts     func() facts  // read once, when first asked for

	mover mover
	calls sync.WaitGroup
	last  map[int]chan struct{} // by pid: closed when its newest call has ended
}

// receive starts a call for each request.
func (s *server) receive() error {
	var open sync.Once
	for {
		m, err := s.client.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("receive request: %w", err)
		}
		var q wire.Request
		if err := worker.Decode(m.Body, &q); err != nil {
			return fmt.Errorf("request %d: %w", m.ID, err)
		}
		open.Do(func() { go s.open(q.Early) })
		before, done := s.last[q.PID], make(chan struct{})
		if q.PID != 0 {
			s.last[q.PID] = done
		}
		s.calls.Go(func() {
			defer close(done)
			defer m.Close()
			if before != nil {
				<-before
			}
			s.answer(m, q)
		})
	}
}

// open loads and initialises the driver. The kernel's part of it serves one at a
// time: what NVML is to tell early it is asked before the GPUs are brought up.
func (s *server) open(early bool) {
	s.loadFault = load()
	if early && s.loadFault == nil {
		s.facts()
	}
	close(s.loaded)
	if s.fault = s.loadFault; s.fault == nil {
		s.fault = initialise()
	}
	close(s.opened)
}

func (s *server) answer(m worker.Message, q wire.Request) {
	if q.Op == wire.OpInfo && !q.Fresh && !q.Early {
		go s.facts() // while the driver is being loaded
	}
	r, files := s.reply(q, m.Files)
	defer closeFiles(files)
	if err := s.client.Answer(m.ID, r, files...); err != nil { // only a machine with hundreds of GPUs
		_ = s.client.Answer(m.ID, wire.Reply{Code: 999, Text: err.Error()})
	}
}

func (s *server) reply(q wire.Request, files []*os.File) (wire.Reply, []*os.File) {
	<-s.loaded
	if q.Early && s.loadFault == nil {
		if r, ok := infoEarly(s.facts()); ok {
			return r, nil
		}
	}
	<-s.opened
	switch {
	case q.Op == wire.OpSurvey:
		return survey(), nil // NVML's, not CUDA's: it tells of drivers that CUDA refuses
	case s.fault != nil:
		return *s.fault, nil
	case q.Op == wire.OpReady || q.Op == wire.OpCopyOut || q.Op == wire.OpCopyIn:
		return s.mover.copyMemory(q, files)
	}
	return serve(q, s.facts), nil
}
