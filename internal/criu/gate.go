// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// The life of a gate: the shim listens (ListenGate) before runc starts CRIU. CRIU restores all
// processes, holds each of their threads by ptrace before its next instruction, and its plugin
// connects and names the first process (Await). The shim has the threads that the CUDA driver
// needs let go (Free), restores the GPU state, has them stopped again (Hold), and opens the gate
// (Open): CRIU then lets every thread go. A gate that is closed before it was opened (Close) ends
// the processes: the plugin kills them.

// PluginName is the file name of gpuckpt's CRIU plugin.
const PluginName = "gpuckpt_criu.so"

// gateSocket and pluginSettings are files beside the plugin, see plugin/plugin.c.
const (
	gateSocket     = "gpuckpt.sock"
	pluginSettings = "gpuckpt.conf"
)

// gateAnswer bounds the wait for the plugin's answer to one request. It makes a few system calls.
const gateAnswer = 10 * time.Second

// Device is a device node of a container, by the path that the container sees.
type Device struct {
	Path         string
	Major, Minor int64
}

// FindPlugin returns the path of gpuckpt's CRIU plugin, by the shim's.
func FindPlugin(shim string) (string, error) {
	path, err := version.Beside(shim, PluginName)
	if err != nil {
		return "", fmt.Errorf("find gpuckpt's CRIU plugin: %w", err)
	}
	return path, nil
}

// AddPlugin puts gpuckpt's CRIU plugin and its settings into dir, a directory that CRIU's option
// libdir names. The plugin dumps and restores files of the devices. With gate it waits at the gate
// that ListenGate opens in the same directory. With lines for a sandbox it takes CRIU there.
func AddPlugin(plugin, dir string, devices []Device, gate bool, sandbox []string) error {
	var b strings.Builder
	for _, d := range devices {
		if strings.ContainsAny(d.Path, "\t\n") || len(d.Path) > 255 {
			return fmt.Errorf("set up CRIU's plugin: device path %q is too long or has a tab or newline", d.Path)
		}
		fmt.Fprintf(&b, "device\t%s\t%d\t%d\n", d.Path, d.Major, d.Minor)
	}
	if gate {
		b.WriteString("gate\n")
	}
	for _, line := range sandbox {
		b.WriteString(line + "\n")
	}
	if err := os.WriteFile(filepath.Join(dir, pluginSettings), []byte(b.String()), 0o600); err != nil {
		return fmt.Errorf("set up CRIU's plugin: %w", err)
	}
	to := filepath.Join(dir, PluginName)
	if err := os.Remove(to); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("set up CRIU's plugin: %w", err)
	}
	// A copy, not a link: the plugin finds its settings beside itself.
	data, err := os.ReadFile(plugin)
	if err == nil {
		err = os.WriteFile(to, data, 0o700)
	}
	if err != nil {
		return fmt.Errorf("set up CRIU's plugin: %w", err)
	}
	return nil
}

// Gate is where CRIU's plugin waits with the restored processes. Its questions to the plugin take turns.
type Gate struct {
	turn     sync.Mutex
	dir      *os.File
	listener *net.UnixListener
	conn     *net.UnixConn
}

// ListenGate listens for the plugin in dir. Close must be called.
func ListenGate(dir string) (*Gate, error) {
	if err := os.Remove(filepath.Join(dir, gateSocket)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("listen for CRIU's plugin: %w", err)
	}
	// By a descriptor of the directory: its path is longer than a socket's address may be (108).
	d, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("listen for CRIU's plugin: %w", err)
	}
	at := &net.UnixAddr{Net: "unixpacket", Name: fmt.Sprintf("/proc/self/fd/%d/%s", d.Fd(), gateSocket)}
	l, err := net.ListenUnix("unixpacket", at)
	if err != nil {
		d.Close()
		return nil, fmt.Errorf("listen for CRIU's plugin: %w", err)
	}
	return &Gate{dir: d, listener: l}, nil
}

// Await waits until CRIU has restored all processes and holds their threads. It returns the pid of
// the container's first process, as this program counts. It ends with the context, and with
// ErrHangs when the time is over.
func (g *Gate) Await(ctx context.Context, within time.Duration) (int, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, within, Hangs(within))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { _ = g.listener.SetDeadline(time.Now()) })
	defer stop()
	conn, err := g.listener.AcceptUnix()
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return 0, fmt.Errorf("wait for CRIU to restore the processes: %w", err)
	}
	g.conn = conn
	text, err := g.receive()
	if err != nil {
		return 0, err
	}
	number, ok := strings.CutPrefix(text, "restored ")
	pid, err := strconv.Atoi(number)
	if !ok || err != nil || pid <= 0 {
		return 0, fmt.Errorf("CRIU's plugin says %q, not which process it restored", text)
	}
	return pid, nil
}

// CRIU returns the pid of the CRIU whose plugin waits. Await must have returned.
func (g *Gate) CRIU() (int, error) {
	peer, err := proc.Peer(g.conn)
	if err != nil {
		return 0, fmt.Errorf("find the CRIU at the gate: %w", err)
	}
	return int(peer.Pid), nil
}

// Free lets a thread run on, with all signals blocked.
func (g *Gate) Free(tid int) error { return g.ask("free", tid) }

// Loose lets a thread run on with the signals of the program. It stops where it makes a thread or a child, and
// what it makes stands still until the gate opens.
func (g *Gate) Loose(tid int) error { return g.ask("loose", tid) }

// Hold stops a thread that Free or Loose let go. CRIU must find it stopped when the gate opens.
func (g *Gate) Hold(tid int) error { return g.ask("hold", tid) }

func (g *Gate) ask(what string, tid int) error {
	answer, err := g.exchange(fmt.Sprintf("%s %d", what, tid))
	if err != nil {
		return err
	}
	if answer != "ok" {
		return fmt.Errorf("%s thread %d of a restored process: %s", what, tid, strings.TrimPrefix(answer, "error "))
	}
	return nil
}

// Call has a thread that CRIU holds make a system call of at most six arguments, whose error it
// returns. The thread stands still before and after, as it was.
func (g *Gate) Call(tid int, nr uint64, args ...uint64) error {
	var all [6]uint64
	copy(all[:], args)
	answer, err := g.exchange(fmt.Sprintf("call %d %d %x %x %x %x %x %x", tid, nr, all[0], all[1], all[2], all[3], all[4], all[5]))
	if err != nil {
		return err
	}
	var result int
	if _, err := fmt.Sscanf(answer, "result %d", &result); err != nil {
		return fmt.Errorf("have thread %d of a restored process make a call: %s", tid, strings.TrimPrefix(answer, "error "))
	}
	if result < 0 {
		return unix.Errno(-result)
	}
	return nil
}

// Open opens the gate: CRIU lets all threads go and ends.
func (g *Gate) Open() error { return g.send("go") }

// Close stops listening. A plugin that still waits kills the restored processes.
func (g *Gate) Close() {
	if g == nil {
		return
	}
	if g.conn != nil {
		g.conn.Close()
	}
	g.listener.Close()
	g.dir.Close()
}

func (g *Gate) exchange(text string) (answer string, err error) {
	g.turn.Lock()
	defer g.turn.Unlock()
	if err := g.send(text); err != nil {
		return "", err
	}
	return g.receive()
}

func (g *Gate) send(text string) error {
	if _, err := g.conn.Write([]byte(text)); err != nil {
		return fmt.Errorf("ask CRIU's plugin: %w", err)
	}
	return nil
}

func (g *Gate) receive() (string, error) {
	var buf [128]byte
	if err := g.conn.SetReadDeadline(time.Now().Add(gateAnswer)); err != nil {
		return "", fmt.Errorf("hear CRIU's plugin: %w", err)
	}
	n, err := g.conn.Read(buf[:])
	if err != nil {
		g.conn.Close() // or a late answer is taken for that to the next question
		return "", fmt.Errorf("hear CRIU's plugin: %w", err)
	}
	if n == 0 {
		return "", errors.New("hear CRIU's plugin: CRIU ended")
	}
	return string(buf[:n]), nil
}
