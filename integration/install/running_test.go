// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd/install"
)

// A node with containers: the installation restarts containerd, and a container that runs and one
// that is suspended live on, also while a newer release takes the place of theirs. A removal is
// refused while they run, and leaves nothing after them.
func TestContainersLiveOn(t *testing.T) {
	results.Add(t)
	node := t.TempDir()
	prefix := filepath.Join(node, "opt")
	c := session.Own(t, harness.Options{CRI: true, Config: harness.OwnCNI(t), Env: []string{"PATH=" + filepath.Join(prefix, "bin") + ":" + bins.SearchPath()}})
	containerd, err := bins.Path("containerd")
	if err != nil {
		t.Fatal(err)
	}
	config, err := os.ReadFile(c.ConfigPath())
	if err != nil {
		t.Fatal(err)
	}
	asked, done := filepath.Join(node, "asked"), filepath.Join(node, "done")
	args := []string{"--record", filepath.Join(node, "record.json"), "--restart",
		"--restart-command", "touch " + asked + "; while [ ! -e " + done + " ]; do sleep 0.05; done; rm " + done}
	do := func(release, verb string, more ...string) (install.Result, error) {
		t.Helper()
		ended := make(chan struct{})
		restarted := make(chan error, 1)
		go func() { restarted <- restartWhenAsked(t.Context(), c, asked, done, ended) }()
		r, err := gpuckpt(t, release, nil, append(append([]string{verb}, args...), more...)...)
		close(ended)
		if rerr := <-restarted; rerr != nil {
			t.Fatal(rerr)
		}
		return r, err
	}

	first := release(t, "")
	put := []string{"--prefix", prefix, "--containerd-config", c.ConfigPath(), "--containerd", containerd}
	r, err := do(first, "install", put...)
	if err != nil || r.Restart || r.Prefix != prefix {
		t.Fatalf("%+v, %v", r, err)
	}
	running := c.Work(t, harness.RunSpec{ID: "running", GPUs: []int{0}}, "counter")
	suspended := c.Work(t, harness.RunSpec{ID: "suspended", GPUs: []int{1 % len(gpu.Devices)}}, "counter")
	running.Expect(t, "count", "101")
	suspended.Expect(t, "count", "101")
	command := func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), filepath.Join(prefix, "bin/gpuckpt"), append(args, "--address", c.Address(), "--namespace", c.Namespace())...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", args, err, out)
		}
	}
	command("suspend", suspended.ID)

	second := release(t, "a newer release")
	pid := c.Pid()
	if r, err = do(second, "install", append(put, "--restart-command", "false")...); err != nil || len(r.Changed) == 0 || c.Pid() != pid {
		t.Fatalf("an upgrade, which needs no restart: %+v, %v", r, err)
	}
	if err := c.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	running.Expect(t, "count", "102")
	if err := running.Checkpoint(t.Context(), "gpuckpt.test/upgraded:1"); err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	command("resume", suspended.ID)
	suspended.Expect(t, "count", "102")

	_, err = do(second, "uninstall")
	harness.Says(t, err, "containers still run with gpuckpt's shim")
	running.MustRemove(t)
	suspended.MustRemove(t)
	back, err := c.Restore(t.Context(), running.ID, "gpuckpt.test/upgraded:1", running.Port)
	if err != nil {
		t.Fatalf("%v\n%s", err, c.LogTail(4000))
	}
	back.Expect(t, "count", "103") // by the new shim, out of a checkpoint of the old one
	back.MustRemove(t)
	harness.Within(t, "the shims are gone", func() bool {
		_, err = do(second, "uninstall")
		return err == nil
	})
	if left := files(t, prefix); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	if now, err := os.ReadFile(c.ConfigPath()); err != nil || string(now) != string(config) {
		t.Errorf("containerd's configuration is %s, %v", now, err)
	}
	if log := c.Log(); strings.Contains(log, "level=fatal") {
		t.Error(log)
	}
}

// restartWhenAsked restarts containerd each time that a file appears.
func restartWhenAsked(ctx context.Context, c *harness.Containerd, asked, done string, ended <-chan struct{}) error {
	for {
		select {
		case <-ended:
			return nil
		case <-time.After(20 * time.Millisecond):
		}
		if os.Remove(asked) != nil {
			continue
		}
		if err := c.Restart(ctx); err != nil {
			return err
		}
		if err := os.WriteFile(done, nil, 0o600); err != nil {
			return err
		}
	}
}
