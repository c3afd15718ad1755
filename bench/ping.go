// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"
)

// pinger asks a workload to count, about a thousand times a second, to see for
// how long it does not: what a client of the program would notice.
type pinger struct {
	cancel context.CancelFunc
	done   sync.WaitGroup
	worst  time.Duration
	err    error
}

// pingEvery is the pause between an answer and the next question.
const pingEvery = time.Millisecond

// startPinger begins to ask on a UDP port of this machine.
func startPinger(ctx context.Context, port int) *pinger {
	ctx, cancel := context.WithCancel(ctx)
	p := &pinger{cancel: cancel}
	p.done.Go(func() { p.err = p.run(ctx, port) })
	return p
}

func (p *pinger) run(ctx context.Context, port int) error {
	conn, err := net.DialUDP("udp4", nil, &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		return fmt.Errorf("ping the workload: %w", err)
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	answer := make([]byte, 1500)
	last := time.Now()
	for ctx.Err() == nil {
		if _, err = conn.Write([]byte("count")); err == nil {
			_, err = conn.Read(answer)
		}
		if err != nil {
			break
		}
		p.worst = max(p.worst, time.Since(last))
		last = time.Now()
		time.Sleep(pingEvery)
	}
	p.worst = max(p.worst, time.Since(last))
	if ctx.Err() != nil {
		return nil
	}
	return fmt.Errorf("ping the workload: %w", err)
}

// stop ends the pinging and gives the longest time between two answers.
func (p *pinger) stop() (time.Duration, error) {
	p.cancel()
	p.done.Wait()
	if p.err == nil && p.worst == 0 {
		return 0, errors.New("ping the workload: no answer at all")
	}
	return p.worst, p.err
}
