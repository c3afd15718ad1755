// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// documented are the sections of docs/cli.md whose lines make up one session,
// in their order.
var documented = []string{
	"Checkpoint", "Restore", "Look at a checkpoint", "Sign a checkpoint", "Registries", "Other forms", "List and remove checkpoints", "Single processes", "As cuda-checkpoint",
}

// commandsOf gives the command lines of a document, by section.
func commandsOf(t *testing.T, path string) map[string][]string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	lines, section := make(map[string][]string), ""
	for line := range strings.Lines(string(data)) {
		line = strings.TrimSuffix(line, "\n")
		if title := strings.TrimLeft(line, "#"); strings.HasPrefix(line, "##") && strings.HasPrefix(title, " ") {
			section = title[1:] // also of a part of a section, which another test runs
		}
		if command, ok := strings.CutPrefix(line, "$ "); ok {
			lines[section] = append(lines[section], command)
		}
	}
	return lines
}

// Every line of docs/cli.md does what it is written there for, one after the
// other, on this registry, container and process.
func TestDocumentedCommands(t *testing.T) {
	sections := commandsOf(t, "../../docs/cli.md")
	s := serve(t, false)
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{ID: "job"}, "counter")
	k.Expect(t, "next", "101")
	port := k.Port
	work := t.TempDir()
	// The snapshotter is by default the namespace's.
	if _, err := c.Ctr(t.Context(), "namespaces", "label", c.Namespace(), "containerd.io/defaults/snapshotter="+c.Snapshotter()); err != nil {
		t.Fatal(err)
	}
	uuid := regexp.MustCompile(`GPU-[0-9a-f]{8}-[0-9a-f-]{27}`)
	cdi := cdiSpec(t, c)
	bare := process(t, c)
	var pairs []string // a process outside containers has all of them
	for _, d := range gpu.Devices {
		pairs = append(pairs, d.UUID+"="+d.UUID)
	}

	run := func(section, line string) {
		pid, err := k.Pid(t.Context())
		if section == "As cuda-checkpoint" {
			pid, err = bare.Pid, nil // it has no --join, which a device map for a container needs
		}
		if err != nil && !strings.HasPrefix(line, "ctr ") && !strings.HasPrefix(line, "gpuckpt restore") {
			t.Fatal(err)
		}
		line = uuid.ReplaceAllString(line, gpu.Devices[0].UUID)
		line = strings.NewReplacer("example.com/base:1", harness.WorkloadImage, "example.com", s.host, "4711", strconv.Itoa(pid),
			"OLD=NEW", strings.Join(pairs, ",")).Replace(line)
		// What this machine has of its own: the network, the GPU.
		if strings.HasPrefix(line, "gpuckpt restore") {
			line += " --net-host --cdi-spec-dirs " + cdi
		}
		t.Log(line)
		cmd := exec.CommandContext(t.Context(), "bash", "-c", line)
		cmd.Dir = work
		cmd.Env = append([]string{
			"CONTAINERD_ADDRESS=" + c.Address(), "CONTAINERD_NAMESPACE=" + c.Namespace(), "GPUCKPT_IMAGE_PATH=" + c.Dumps(),
			"PATH=" + bins.SearchPath(), "HOME=" + work, "TMPDIR=" + t.TempDir(), "GPUCKPT_CONFIG=" + c.ShimConfigPath(),
		}, c.HostEnv()...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s\n%s", line, err, out, c.LogTail(2000))
		}
	}
	for _, section := range documented {
		if len(sections[section]) == 0 {
			t.Errorf("docs/cli.md has no commands in a section %q", section)
		}
		for _, line := range sections[section] {
			if strings.HasPrefix(line, "ln -s ") {
				continue // into the system; make has made such a link in .build/bin
			}
			run(section, line)
			if strings.HasPrefix(line, "gpuckpt restore") {
				k = adopt(t, c, "job", port)
				k.Expect(t, "next", "102")
			}
		}
	}
	k.Expect(t, "next", "103")
	if _, err := os.Stat(filepath.Join(work, "checkpoint.tar")); err != nil {
		t.Error(err)
	}
}

// process is a counter outside containers that has a GPU open.
func process(t *testing.T, c *harness.Containerd) *os.Process {
	t.Helper()
	program, err := bins.Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "counter", "--port", strconv.Itoa(port))
	cmd.Env = append(os.Environ(), c.HostEnv()...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	c.Adopt("bare", port).Expect(t, "next", "101")
	return cmd.Process
}
