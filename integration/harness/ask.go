// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// askLimit bounds one question where the context does not: for a program that hangs, not for one that a loaded
// machine has not started yet.
const askLimit = 2 * time.Minute

// FreePort returns a port of this machine that nothing listens on now, by UDP or
// TCP, and that it has given to no other test. The kernel gives it to no connection meanwhile: it is below the range for
// these (ip_local_port_range begins at 32768).
func FreePort() (int, error) { return FreePorts(1) }

// FreePorts returns the first of n such ports in a row.
func FreePorts(n int) (int, error) {
	const first, last = 10240, 32000
	for range 100 {
		port := first + rand.IntN(last-first-n)
		free := true
		for p := port; p < port+n && free; p++ {
			free = isFree(p)
		}
		if free {
			return port, nil
		}
	}
	return 0, fmt.Errorf("find %d free ports in a row: there are none", n)
}

func isFree(port int) bool {
	udp, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		return false
	}
	udp.Close()
	tcp, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
	if err != nil {
		return false
	}
	tcp.Close()
	claim, err := net.Listen("unix", "@gpuckpt-port-"+strconv.Itoa(port))
	if err != nil {
		return false
	}
	claimed.Store(port, claim)
	return true
}

// claimed are the ports that are another's no more while this process lives: those of a program that has not
// begun yet, or is being restored, are free to the kernel. The claim is an abstract Unix socket, of which
// each network has its own.
var claimed sync.Map

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
