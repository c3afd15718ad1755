// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// cudaPlugin is the directory of CRIU's own CUDA plugin: beside the other tools
// in the cache of hack/setup, or with CRIU in a bundle.
func cudaPlugin(t *testing.T) string {
	t.Helper()
	for _, place := range []string{"../criu-plugins", "plugins"} {
		if path, err := bins.Path(filepath.Join(place, "cuda_plugin.so")); err == nil {
			return filepath.Dir(path)
		}
	}
	t.Skip("CRIU is here without its CUDA plugin")
	return ""
}

// forcePlugin makes the plugin act where the kernel knows of no NVIDIA GPU: it
// looks for /proc/driver/nvidia/gpus, which the software GPU has not
// (FI_PLUGIN_CUDA_FORCE_ENABLE in CRIU's fault-injection.h).
const forcePlugin = "CRIU_FAULT=138"

// CRIU alone, with its own CUDA plugin, dumps and restores the counter when it
// finds this project's program under the name cuda-checkpoint.
func TestCRIUPlugin(t *testing.T) {
	results.Add(t)
	plugin := cudaPlugin(t)
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	env := append(shared.HostEnv(), "PATH="+bins.SearchPath())
	if gpu.Kind == harness.SoftwareGPU {
		env = append(env, forcePlugin)
	}
	run := func(name string, args ...string) (string, error) {
		program, err := bins.Path(name)
		if err != nil {
			t.Fatal(err)
		}
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = env
		out, err := cmd.CombinedOutput()
		return strings.TrimSpace(string(out)), err
	}
	counter := begin(t, env, "counter", "--port", strconv.Itoa(port))
	pid := strconv.Itoa(counter.Process.Pid)
	k := &harness.Container{ID: "a counter without a container", Port: port}
	k.Expect(t, "count", "101")
	if state, err := run("cuda-checkpoint", "--get-state", "--pid", pid); err != nil || state != "running" {
		t.Fatalf("cuda-checkpoint says %q, error %v; want running", state, err)
	}

	images := t.TempDir()
	common := []string{"-D", images, "-v4", "--shell-job", "--libdir", plugin, "--network-lock", "skip"}
	if out, err := run("criu", append([]string{"dump", "-t", pid, "-o", "dump.log"}, common...)...); err != nil {
		t.Fatalf("criu dump: %v %s\n%s", err, out, pluginLines(t, images, "dump.log"))
	}
	log := pluginLines(t, images, "dump.log")
	if !strings.Contains(log, "Checkpointing CUDA devices on pid "+pid) {
		t.Errorf("the plugin took no part in the dump:\n%s", log)
	}
	_ = counter.Wait() // so that its pid is free
	if out, err := run("criu", append([]string{"restore", "-d", "-o", "restore.log"}, common...)...); err != nil {
		t.Fatalf("criu restore: %v %s\n%s", err, out, pluginLines(t, images, "restore.log"))
	}
	t.Cleanup(func() {
		if err := syscall.Kill(counter.Process.Pid, syscall.SIGKILL); err != nil {
			t.Error(err)
		}
	})
	k.Expect(t, "count", "102")
	if state, err := run("cuda-checkpoint", "--get-state", "--pid", pid); err != nil || state != "running" {
		t.Fatalf("after the restore cuda-checkpoint says %q, error %v; want running", state, err)
	}
}

// begin starts gpuwork on the host, in a session of its own as CRIU wants it.
func begin(t *testing.T, env []string, args ...string) *exec.Cmd {
	t.Helper()
	program, err := bins.Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Env = env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if cmd.ProcessState == nil { // the dump did not end it
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	return cmd
}

// pluginLines are the lines of a CRIU log about the plugin, and the errors.
func pluginLines(t *testing.T, dir, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		return err.Error()
	}
	var kept strings.Builder
	for line := range strings.Lines(string(data)) {
		if strings.Contains(line, "cuda_plugin") || strings.Contains(line, "Error (") {
			kept.WriteString(line)
		}
	}
	return kept.String()
}
