// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/client"
)

// startLimit bounds the daemon's start, dialLimit one try to reach it, endLimit
// each step of its end.
const (
	startLimit = 60 * time.Second
	dialLimit  = time.Second
	endLimit   = 30 * time.Second
)

// Options say how a containerd is started. Only Bins is needed.
type Options struct {
	// Bins are the programs; the daemon, its shims, runc and CRIU come from there.
	Bins Bins
	// GPU is what containers with RunSpec.GPUs get, and what the shim's helper
	// finds; from DetectGPU. The zero value gives none.
	GPU GPU
	// Dir is the directory in which the instance's own is made; empty for that
	// of temporary files. Checkpoints lie in it, so it needs space; a path of
	// more than some 60 bytes makes socket names too long.
	Dir string
	// Env are further variables for the daemon, and by inheritance for the
	// shims, runc, CRIU and the helper; KEY=value each.
	Env []string
	// ShimConfig is the shim's configuration (config.toml). The shim never
	// reads the machine's own.
	ShimConfig string
	// CRI turns the CRI plugin on, which the kubelet and crictl talk to; off, the
	// daemon starts faster.
	CRI bool
	// Config is further TOML for the daemon's configuration (version 3),
	// appended as it is.
	Config string
	// ConfigIn gives more of the same, for an instance in that directory; nil
	// gives none.
	ConfigIn func(dir string) string
	// Namespace is the containerd namespace; empty for one that no other
	// instance has. CRI's containers are in "k8s.io".
	Namespace string
	// Snapshotter is "overlayfs" or "native"; empty takes overlayfs where the
	// file system of Dir allows it, else native.
	Snapshotter string
	// Debug sets the daemon's and the shims' log level to debug.
	Debug bool
	// Machine gives the instance mount and network namespaces and directories of its own, as far as
	// programs know them by no other name than that on a node (machine.go). The shim then reads
	// /etc/gpuckpt/config.toml of the machine, and ShimConfig is not used.
	Machine bool
	// Logf gets a line about each notable thing (testing.T's Logf, say), and
	// each ctr command before it is run, "ctr tasks kill …" without address and
	// namespace; nil drops them.
	Logf func(format string, args ...any)
}

// Containerd is one running private containerd. Its methods may be called from
// several goroutines.
type Containerd struct {
	opts        Options
	home        home
	snapshotter string
	machine     *exec.Cmd // keeps the namespaces of Options.Machine; nil without
	daemon      *exec.Cmd
	exited      chan struct{} // closed when the daemon was waited for
	client      *client.Client

	stopOnce sync.Once
	stopErr  error
	stopped  chan struct{} // closed when Stop is done
	release  func() bool   // undoes the watch over the context given to Start
}

// Start makes a directory, starts a containerd in it and returns when it
// answers. When ctx ends, the instance is stopped as if by Stop; a program that
// ends after that should first wait for Stop to return, see Interruptible.
//
// On error nothing stays behind, and the error holds the end of the daemon's
// log.
func Start(ctx context.Context, opts Options) (_ *Containerd, err error) {
	if opts.Logf == nil {
		opts.Logf = func(string, ...any) {}
	}
	program, err := opts.Bins.Path("containerd")
	if err != nil {
		return nil, err
	}
	parent := opts.Dir
	if parent == "" {
		parent = os.TempDir()
	}
	sweep(parent, opts.Logf)
	h, err := newHome(parent)
	if err != nil {
		return nil, err
	}
	c := &Containerd{
		opts:    opts,
		home:    h,
		exited:  make(chan struct{}),
		stopped: make(chan struct{}),
		release: func() bool { return true },
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%w\n%s", err, c.LogTail(2000)), c.Stop())
		}
	}()
	if c.snapshotter = opts.Snapshotter; c.snapshotter == "" {
		c.snapshotter = "overlayfs"
		if why := tryOverlay(h.dir); why != nil {
			c.snapshotter = "native"
			opts.Logf("the native snapshotter is used: %v", why)
		}
	}
	if opts.Machine {
		if err := c.startMachine(); err != nil {
			return nil, err
		}
	}
	if err := c.writeConfig(); err != nil {
		return nil, err
	}
	if err := c.prepareGPU(); err != nil {
		return nil, err
	}
	if err := c.startDaemon(program); err != nil {
		return nil, err
	}
	if err := c.connect(ctx); err != nil {
		return nil, err
	}
	c.release = context.AfterFunc(ctx, func() {
		_ = c.stop("stopping containerd: %v", context.Cause(ctx))
	})
	opts.Logf("containerd %d answers at %s (snapshotter %s)", c.daemon.Process.Pid, h.socket(), c.snapshotter)
	return c, nil
}

// Client is a client of the instance, in its namespace.
func (c *Containerd) Client() *client.Client { return c.client }

// Address is the path of the daemon's socket.
func (c *Containerd) Address() string { return c.home.socket() }

// Namespace is the containerd namespace that the instance's containers are in,
// and, unless Options named one, the name of their parent cgroup. Then no other
// instance has the same.
func (c *Containerd) Namespace() string {
	if c.opts.Namespace != "" {
		return c.opts.Namespace
	}
	return c.home.name()
}

// Cgroup is the name of the cgroup that is removed with the instance, and all
// below it.
func (c *Containerd) Cgroup() string { return c.home.name() }

// Dir is the instance's directory. Tests may put files of theirs into it; it is
// removed by Stop.
func (c *Containerd) Dir() string { return c.home.dir }

// Snapshotter is the name of the snapshotter in use.
func (c *Containerd) Snapshotter() string { return c.snapshotter }

// Pid is the daemon's process id.
func (c *Containerd) Pid() int { return c.daemon.Process.Pid }

// GPU is what Options named.
func (c *Containerd) GPU() GPU { return c.opts.GPU }

// Bins are what Options named.
func (c *Containerd) Bins() Bins { return c.opts.Bins }

// Log returns what the daemon and the shims have logged up to now.
func (c *Containerd) Log() string {
	data, err := os.ReadFile(c.home.log())
	if err != nil {
		return ""
	}
	return string(data)
}

// LogTail returns the last bytes of the log, n at most.
func (c *Containerd) LogTail(n int) string {
	log := c.Log()
	return log[max(0, len(log)-n):]
}

// startDaemon starts containerd in a process group of its own, so that Ctrl-C at
// a terminal reaches this program alone, which then stops it in order.
func (c *Containerd) startDaemon(program string) error {
	log, err := os.OpenFile(c.home.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return fmt.Errorf("make containerd's log: %w", err)
	}
	defer log.Close()
	c.daemon = exec.Command(program, "--config", c.home.config())
	c.daemon.Dir = c.home.dir
	c.daemon.Env = c.daemonEnv()
	c.daemon.Stdout, c.daemon.Stderr = log, log
	c.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.enter(c.daemon)
	if err := c.daemon.Start(); err != nil {
		return fmt.Errorf("start containerd: %w", err)
	}
	go func(daemon *exec.Cmd, exited chan struct{}) {
		_ = daemon.Wait() // how it ended is in the log
		close(exited)
	}(c.daemon, c.exited)
	return nil
}

// connect waits until the daemon answers, ends, or startLimit is over.
func (c *Containerd) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		if cl, err := c.dial(ctx); err == nil {
			c.client = cl
			return nil
		}
		select {
		case <-c.exited:
			return fmt.Errorf("start containerd: it ended: %s", c.daemon.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("wait for containerd: %w", context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// dial makes a client if the daemon answers at once.
func (c *Containerd) dial(ctx context.Context) (*client.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, dialLimit)
	defer cancel()
	cl, err := client.New(c.home.socket(), client.WithDefaultNamespace(c.Namespace()), client.WithTimeout(dialLimit))
	if err != nil {
		return nil, err
	}
	if ok, err := cl.IsServing(ctx); !ok || err != nil {
		return nil, errors.Join(errors.New("it does not serve yet"), err, cl.Close())
	}
	return cl, nil
}

// Stop ends every container of the instance, the daemon and all that it
// started, unmounts what is left below the instance's directory, removes its
// cgroups, sockets and the directory. It can be called more than once, and
// returns when all is done. The error names what could not be ended or removed.
func (c *Containerd) Stop() error { return c.stop("stopping containerd") }

// stop is Stop with a line for Logf, written by the first call alone: a later
// one may come from a test that is over and must not log.
func (c *Containerd) stop(format string, args ...any) error {
	c.stopOnce.Do(func() {
		defer close(c.stopped)
		c.opts.Logf(format, args...)
		c.release()
		ctx, cancel := context.WithTimeout(context.Background(), endLimit)
		defer cancel()
		if c.client != nil {
			// In order first, so that the shims write their logs; what
			// this leaves, clean takes by force.
			if err := c.removeContainers(ctx); err != nil {
				c.opts.Logf("remove the containers: %v", err)
			}
			_ = c.client.Close()
		}
		if c.daemon != nil && c.daemon.Process != nil {
			_ = c.daemon.Process.Signal(syscall.SIGTERM)
			select {
			case <-c.exited:
			case <-ctx.Done():
				_ = c.daemon.Process.Kill()
				<-c.exited
			}
		}
		c.stopMachine()
		c.stopErr = c.home.clean()
	})
	<-c.stopped
	return c.stopErr
}

// daemonEnv is the environment of the daemon and of all that it starts.
func (c *Containerd) daemonEnv() []string {
	env := []string{
		"PATH=" + c.opts.Bins.SearchPath(),
		"HOME=" + c.home.dir,
		"TMPDIR=" + c.home.temp(),
		// By this variable clean finds the processes of the instance.
		envHome + "=" + c.home.dir,
	}
	if !c.opts.Machine { // it has the file at its place
		env = append(env, "GPUCKPT_CONFIG="+c.home.shimConfig())
	}
	env = append(env, c.HostEnv()...)
	return append(env, c.opts.Env...)
}

// ShimConfigPath is the shim's configuration file, the value of GPUCKPT_CONFIG.
func (c *Containerd) ShimConfigPath() string { return c.home.shimConfig() }

// SetShimConfig replaces the shim's configuration, at once: a shim that begins meanwhile would take an
// empty file for the defaults. Shims that run read it at their next start.
func (c *Containerd) SetShimConfig(toml string) error {
	path := c.home.shimConfig()
	err := os.WriteFile(path+".new", []byte(toml), 0o600)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("write the shim's configuration: %w", err)
	}
	return nil
}

// CRIUConfigPath is a CRIU configuration that needs no packet filter on the
// machine. A container with the annotation "org.criu.config" naming it can be
// checkpointed by runc's own shim; this project's shim makes its own.
func (c *Containerd) CRIUConfigPath() string { return filepath.Join(c.home.dir, "criu.conf") }
