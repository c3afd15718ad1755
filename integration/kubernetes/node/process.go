// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// process is one running daemon of the node's, with a log in the node's directory.
type process struct {
	cmd    *exec.Cmd
	log    string
	exited chan struct{} // closed when it was waited for
}

// start starts a program in the background.
func (n *Node) start(program string, args ...string) (*process, error) {
	// Not with a context: daemons end in order, in Stop.
	cmd, err := n.Command(context.Background(), program, args...)
	if err != nil {
		return nil, err
	}
	return n.startCommand(program, cmd)
}

// startCommand is start for a command as it is.
func (n *Node) startCommand(name string, cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, log: filepath.Join(n.Dir(), name+".log"), exited: make(chan struct{})}
	log, err := os.Create(p.log)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		_ = cmd.Wait() // how it ended is in the log
		close(p.exited)
	}()
	return p, nil
}

// pause waits, or fails when the process has ended or the context has.
func (p *process) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-p.exited:
		return fmt.Errorf("%s ended: %s", filepath.Base(p.cmd.Path), p.cmd.ProcessState)
	default:
		return pause(ctx, d)
	}
}

// tail is the last bytes of the log, size at most.
func (p *process) tail(size int) string {
	if p == nil {
		return ""
	}
	data, err := os.ReadFile(p.log)
	if err != nil {
		return ""
	}
	return string(data[max(0, len(data)-size):])
}

// stop ends the process and waits for it.
func (p *process) stop() {
	if p == nil {
		return
	}
	_ = p.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(endLimit):
		_ = p.cmd.Process.Kill()
		<-p.exited
	}
}

// pause waits, or fails with the context's cause.
func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}
