// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package docker tests GPU containers that an unmodified dockerd runs, checkpoints and restores
// through the shim.
package docker

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/docs/commands"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	shared *harness.Containerd
	bins   harness.Bins
)

func TestMain(m *testing.M) {
	if err := harness.InOwnNetwork("/run/docker", "/etc/docker", "/var/lib/docker"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	harness.MainShared(m.Run, func(s *harness.Session, c *harness.Containerd) { shared, bins = c, s.Bins }, nil)
}

// daemon is a dockerd on the shared containerd.
type daemon struct {
	socket string
}

func serve(t *testing.T) *daemon {
	t.Helper()
	dir := t.TempDir()
	// dockerd leaves its network namespace mounted.
	t.Cleanup(func() { _ = unix.Unmount(filepath.Join(dir, "run", "netns", "default"), unix.MNT_DETACH) })
	d := &daemon{socket: "unix://" + filepath.Join(dir, "docker.sock")}
	cdi := filepath.Join(dir, "cdi")
	if err := shared.WriteCDISpec(cdi); err != nil {
		t.Fatal(err)
	}
	config := filepath.Join(dir, "daemon.json")
	if err := os.WriteFile(config, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd, err := shared.Command(context.Background(), "dockerd",
		"--config-file", config, "--host", d.socket, "--containerd", shared.Address(), "--containerd-namespace", shared.Namespace(),
		"--containerd-plugins-namespace", shared.Namespace()+"-plugins", "--storage-driver", shared.Snapshotter(),
		"--data-root", filepath.Join(dir, "root"), "--exec-root", filepath.Join(dir, "run"), "--pidfile", filepath.Join(dir, "pid"),
		"--bridge", "none", "--iptables=false", "--ip6tables=false", "--userland-proxy=false", "--experimental", "--cdi-spec-dir", cdi)
	if err != nil {
		t.Fatalf("%v; run `make test-docker DOCKER=DIR`", err)
	}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan struct{})
	go func() {
		_ = cmd.Wait() // how it ended is in the log
		close(exited)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-exited:
		case <-time.After(time.Minute):
			_ = cmd.Process.Kill()
			<-exited
		}
		if t.Failed() {
			text := log.String()
			t.Logf("dockerd:\n%s", text[max(0, len(text)-6000):])
		}
	})
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(50 * time.Millisecond) {
		_, err := d.docker(t.Context(), "version")
		if err == nil {
			return d
		}
		select {
		case <-exited:
			t.Fatalf("dockerd ended: %s", cmd.ProcessState)
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("dockerd does not answer: %v", err)
		}
	}
}

// docker runs the client and returns what it prints.
func (d *daemon) docker(ctx context.Context, args ...string) (string, error) {
	program, err := bins.Path("docker")
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, append([]string{"--host", d.socket}, args...)...)
	cmd.Env = []string{"HOME=" + shared.Dir()}
	var errs bytes.Buffer
	cmd.Stderr = &errs
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("docker %s: %w\n%s%s", strings.Join(args, " "), err, out, errs.String())
	}
	return strings.TrimSpace(string(out)), nil
}

func (d *daemon) must(t *testing.T, args ...string) string {
	t.Helper()
	out, err := d.docker(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared.LogTail(4000))
	}
	return out
}

// The commands of docs/clients.md, one after the other: the counter counts on after each.
func TestDocker(t *testing.T) {
	d := serve(t)
	lines, err := commands.Of("../../docs/clients.md")
	if err != nil {
		t.Fatal(err)
	}
	lines = slices.DeleteFunc(lines, func(l commands.Line) bool { return l.Section != "Docker" })
	if len(lines) < 8 {
		t.Fatalf("docs/clients.md has %d commands", len(lines))
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = d.docker(context.WithoutCancel(t.Context()), "rm", "--force", "job") }) // or it was never there
	count := 100
	for _, l := range lines {
		text := strings.NewReplacer(" IMAGE", " "+harness.WorkloadImage+" counter --port "+strconv.Itoa(port),
			"--namespace moby", "--namespace "+shared.Namespace(), "CONTAINER-ID", "$(docker inspect --format '{{.Id}}' job)").Replace(l.Text)
		t.Log(text)
		cmd := exec.CommandContext(t.Context(), "bash", "-c", text)
		cmd.Env = append([]string{
			"HOME=" + shared.Dir(), "PATH=" + bins.SearchPath(), "DOCKER_HOST=" + d.socket, "CONTAINERD_ADDRESS=" + shared.Address(),
			"GPUCKPT_IMAGE_PATH=" + shared.Dumps(), "GPUCKPT_CONFIG=" + shared.ShimConfigPath(),
		}, shared.HostEnv()...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s\n%s", err, out, shared.LogTail(4000))
		}
		switch {
		case strings.Contains(text, "checkpoint create"), strings.Contains(text, " checkpoint "):
			if code := d.must(t, "wait", "job"); code == "" {
				t.Error("the container did not end")
			}
		case strings.Contains(text, "docker rm "), strings.Contains(text, " suspend "):
		default:
			count++
			got, err := harness.Ask(t.Context(), "127.0.0.1:"+strconv.Itoa(port), "count")
			if err != nil {
				t.Fatalf("%v\n%s", err, shared.LogTail(4000))
			}
			if got != strconv.Itoa(count) {
				t.Fatalf("after %s the counter is %s, want %d", text, got, count)
			}
		}
	}
}
