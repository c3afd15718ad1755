// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// ConfigureShim is SetShimConfig with settings that make what a shim leaves on a
// machine go with the instance: CRIU's logs, records, and the key that signs checkpoints and the
// cgroup of staging memory, unless the text has the sections [signing] and [staging] itself.
func (c *Containerd) ConfigureShim(toml string) error {
	if !strings.Contains(toml, "[signing]") {
		toml += fmt.Sprintf("\n[signing]\nkey = %q\n", c.SigningKey())
	}
	if !strings.Contains(toml, "[staging]") {
		toml += "\n" + c.Staging("staging", "")
	}
	return c.SetShimConfig(fmt.Sprintf("log_dir = %q\nstate_dir = %q\n%s", c.CRIULogs(), c.Records(), toml))
}

// AnyCheckpoint is a section of a shim's configuration: a checkpoint is restored whoever made
// it, also one that a test has changed.
const AnyCheckpoint = "[restore]\npolicy = \"annotated\"\n"

// SigningKey is the file of the key that signs the instance's checkpoints.
func (c *Containerd) SigningKey() string { return filepath.Join(c.Dir(), "signing.key") }

// Records is where the shims keep records of containers that they change.
func (c *Containerd) Records() string { return filepath.Join(c.Dir(), "records") }

// CRIULogs is where the shims keep the logs of CRIU.
func (c *Containerd) CRIULogs() string { return filepath.Join(c.Dir(), "criu-logs") }

// Staging is the section [staging] of a shim's configuration, with these
// settings and the cgroup of that name, which goes with the instance.
func (c *Containerd) Staging(cgroup, settings string) string {
	return fmt.Sprintf("[staging]\ncgroup = %q\n%s\n", c.StagingCgroup(cgroup), settings)
}

// StagingCgroup is the cgroup that Staging sets.
func (c *Containerd) StagingCgroup(cgroup string) string { return filepath.Join(c.Cgroup(), cgroup) }

// Configured is ConfigureShim until the test ends, or until the function that it
// gives is called.
func (c *Containerd) Configured(t T, toml string) (undo func()) {
	t.Helper()
	before, err := os.ReadFile(c.ShimConfigPath())
	if err == nil {
		err = c.ConfigureShim(toml)
	}
	if err != nil {
		t.Fatal(err)
	}
	return undone(t, func() error { return c.SetShimConfig(string(before)) })
}

// SoftwareGPU is SetSoftwareGPU until the test ends, or until the function that
// it gives is called. A real GPU cannot be told: the test is skipped.
func (c *Containerd) SoftwareGPU(t T, lines string) (undo func()) {
	t.Helper()
	if c.opts.GPU.Kind != SoftwareGPU {
		t.Skip("only the software GPU can be told to: " + lines)
	}
	if err := c.SetSoftwareGPU(lines); err != nil {
		t.Fatal(err)
	}
	return undone(t, func() error { return c.SetSoftwareGPU("") })
}

// undone has a change undone at the end of a test, if not before.
func undone(t T, undo func() error) func() {
	try := func() {
		if err := undo(); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(try)
	return try
}
