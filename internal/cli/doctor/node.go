// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// Node is where the checks look. The zero value is this machine, with this program's environment.
type Node struct {
	// Root is put before /proc, /sys, /boot and so on; for tests.
	Root string
	// Env is the environment of shims, containerd's, KEY=value each. nil: this program's.
	Env []string
	// Containerd is the daemon, nil where none was found.
	Containerd *Daemon
	// What is configured: criu, where the driver is, the directories of CDI specifications, the
	// directory of logs, the limit in bytes of the memory for GPU state.
	CRIU         string
	LogDir       string
	DriverRoot   string
	CDISpecDirs  []string
	StagingLimit uint64
}

// Daemon is a containerd that runs.
type Daemon struct {
	Address string
	PID     int
	Program string   // its executable, by a path that is good while it runs
	Config  string   // its configuration file
	Env     []string // KEY=value each
}

// defaultConfig is containerd's, see its command's --config.
const defaultConfig = "/etc/containerd/config.toml"

// dialTimeout bounds the connection to a socket of this machine.
const dialTimeout = 5 * time.Second

// Find finds the containerd that listens at an address, by its socket's other end. It needs root.
func Find(address string) (*Daemon, error) {
	address = strings.TrimPrefix(address, "unix://")
	conn, err := net.DialTimeout("unix", address, dialTimeout)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	peer, err := proc.Peer(conn.(*net.UnixConn))
	if err != nil {
		return nil, fmt.Errorf("ask who listens at %s: %w", address, err)
	}
	d := &Daemon{Address: address, PID: int(peer.Pid), Program: fmt.Sprintf("/proc/%d/exe", peer.Pid)}
	var eerr error
	d.Env, eerr = proc.Environment(d.PID)
	args, aerr := proc.Arguments(d.PID)
	dir, derr := os.Readlink(fmt.Sprintf("/proc/%d/cwd", d.PID))
	if err := cmp.Or(eerr, aerr, derr); err != nil {
		return nil, fmt.Errorf("read what containerd was started with: %w", err)
	}
	if d.Config = cmp.Or(configFlag(args), defaultConfig); !filepath.IsAbs(d.Config) {
		d.Config = filepath.Join(dir, d.Config)
	}
	return d, nil
}

// configFlag returns the value of --config in containerd's command line.
func configFlag(args []string) string {
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		switch {
		case !slices.Contains([]string{"--config", "-config", "-c"}, name):
		case joined:
			return value
		case i+1 < len(args):
			return args[i+1]
		}
	}
	return ""
}

// env returns a variable of the environment that shims are started with.
func (n *Node) env(name string) string {
	if n.Env == nil {
		return os.Getenv(name)
	}
	for _, kv := range slices.Backward(n.Env) { // the last one counts
		if value, ok := strings.CutPrefix(kv, name+"="); ok {
			return value
		}
	}
	return ""
}

// Look returns the path of a program in the $PATH of shims, which is containerd's.
func (n *Node) Look(name string) (string, error) {
	for _, dir := range filepath.SplitList(n.env("PATH")) {
		if dir == "" {
			continue
		}
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err == nil && !st.IsDir() && st.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s in %s", name, n.env("PATH"))
}

func (n *Node) path(elem ...string) string {
	return filepath.Join(append([]string{"/", n.Root}, elem...)...)
}

// read returns a file's text without white space around it, "" if it cannot be read.
func (n *Node) read(elem ...string) string {
	data, _ := os.ReadFile(n.path(elem...))
	return strings.TrimSpace(string(data))
}

func (n *Node) exists(elem ...string) bool {
	_, err := os.Stat(n.path(elem...))
	return err == nil
}

const runTimeout = 30 * time.Second

// Run runs a program in the environment of shims. A status that is not 0 is an *exec.ExitError.
func (n *Node) Run(ctx context.Context, program string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, runTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = n.Env
	cmd.WaitDelay = time.Second
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}
