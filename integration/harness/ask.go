// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/node/freeport"
)

// askLimit bounds one question where the context does not: for a program that hangs, not for one that a loaded
// machine has not started yet.
const askLimit = 2 * time.Minute

// FreePort returns a port for a program that uses the host's network.
func FreePort() (int, error) { return freeport.Row(1) }

// FreePorts returns the first of n such ports in a row.
func FreePorts(n int) (int, error) { return freeport.Row(n) }

// Ask sends one packet with the question to the container's port and returns the
// answer without white space around it. While nothing listens, because the
// program is still starting, it tries again; a packet that was delivered is
// never sent twice, since it may count. The container must share the host's
// network.
//
// The error is the context's when the program does not answer in its time, 30
// seconds at most.
func (k *Container) Ask(ctx context.Context, question string) (string, error) {
	if k.Port == 0 {
		return "", fmt.Errorf("ask %s %q: it has no port", k.ID, question)
	}
	answer, err := Ask(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(k.Port)), question)
	if err != nil {
		return "", fmt.Errorf("ask %s: %w", k.ID, err)
	}
	return answer, nil
}

// Ask is Container.Ask for a program that listens at that address, "host:port",
// whatever started it.
func Ask(ctx context.Context, address, question string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	for try := 0; ; try++ {
		answer, err := ask(ctx, address, question)
		if err == nil {
			return strings.TrimSpace(answer), nil
		}
		if !errors.Is(err, syscall.ECONNREFUSED) {
			return "", fmt.Errorf("ask %s %q: %w", address, question, err)
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("ask %s %q: nothing listens there: %w", address, question, context.Cause(ctx))
		case <-time.After(wait(address, try)):
		}
	}
}

// wait is how long to wait after a question that nobody took. A network other than loopback says so six times
// in a row, and once a second from then on (icmp_ratelimit): the answer to a question between would be
// waited for in vain.
func wait(address string, try int) time.Duration {
	if at, err := netip.ParseAddrPort(address); try < 5 || err == nil && at.Addr().IsLoopback() {
		return 20 * time.Millisecond
	}
	return 1100 * time.Millisecond
}

// ask sends one packet and waits for one.
func ask(ctx context.Context, address, question string) (string, error) {
	conn, err := net.Dial("udp4", address)
	if err != nil {
		return "", err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write([]byte(question)); err != nil {
		return "", err
	}
	answer := make([]byte, 64<<10)
	n, err := conn.Read(answer)
	if err != nil && ctx.Err() != nil {
		return "", context.Cause(ctx)
	}
	return string(answer[:n]), err
}
