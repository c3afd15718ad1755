// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A container that ctr run was told much of is restored by the same words: what replaces a default mount,
// its capabilities, a read-only root, its memory, a label; or all that --privileged is.
func TestRestoreAsCtrRuns(t *testing.T) {
	dir := t.TempDir()
	shm := specs.Mount{Type: "bind", Source: dir, Destination: "/dev/shm", Options: []string{"rbind", "rw"}}
	for name, test := range map[string]struct {
		of   harness.RunSpec
		same []string
		says string // without them
	}{
		"granted": {
			harness.RunSpec{Mounts: []specs.Mount{shm}, CtrFlags: []string{"--cap-add", "CAP_SYS_PTRACE", "--cap-drop", "CAP_KILL", "--read-only", "--user", "0:0", "--label", "team=job", "--memory-limit", "1073741824"}},
			[]string{"--mount", "type=bind,src=" + dir + ",dst=/dev/shm,options=rbind:rw", "--cap-add", "CAP_SYS_PTRACE", "--cap-drop", "CAP_KILL", "--read-only", "--user", "0:0", "--label", "team=job", "--memory-limit", "1GiB"},
			"does not fit the container's spec",
		},
		"privileged": {harness.RunSpec{CtrFlags: []string{"--privileged"}}, []string{"--privileged"}, "does not fit the container's spec"},
	} {
		t.Run(name, func(t *testing.T) {
			test.of.ID = "as-ctr-" + name
			k := shared.Work(t, test.of, "plain", "--shared", "/dev/shm/shared")
			k.Expect(t, "count", "101")
			ref := "gpuckpt.test/" + name + ":1"
			gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref)
			k.MustRemove(t)
			args := []string{"restore", ref, "--name", k.ID, "--net-host", "--snapshotter", shared.Snapshotter()}
			fails(t, shared, nil, []string{test.says}, args...)
			gpuckpt(t, shared, append(args, test.same...)...)
			r := adopt(t, shared, k.ID, k.Port)
			r.Expect(t, "count", "102")
			if name == "granted" {
				container, err := shared.Client().LoadContainer(t.Context(), k.ID)
				if err != nil {
					t.Fatal(err)
				}
				labels, err := container.Labels(t.Context())
				if err != nil || labels["team"] != "job" {
					t.Errorf("the labels are %v, %v", labels, err)
				}
				spec, err := container.Spec(t.Context())
				if err != nil || spec.Linux.Resources.Memory == nil || *spec.Linux.Resources.Memory.Limit != 1<<30 || !spec.Root.Readonly {
					t.Errorf("the spec has %+v, %v", spec.Linux.Resources.Memory, err)
				}
				if _, err := os.Stat(filepath.Join(dir, "shared")); err != nil {
					t.Error(err)
				}
			}
			r.MustRemove(t)
			fails(t, shared, nil, []string{"no size"}, append(args, "--memory-limit", "much")...)
			fails(t, shared, nil, []string{"NAME=VALUE"}, append(args, "--label", "team")...)
		})
	}
}

// A container that had a terminal gets another with --tty.
func TestRestoreTerminal(t *testing.T) {
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k, err := shared.Create(t.Context(), harness.RunSpec{ID: "terminal", Port: port, CtrFlags: []string{"--tty"}, Args: []string{"gpuwork", "plain", "--port", strconv.Itoa(port)}})
	if err != nil {
		t.Fatal(err)
	}
	k.RemoveAtEnd(t)
	container, err := shared.Client().LoadContainer(t.Context(), k.ID)
	if err != nil {
		t.Fatal(err)
	}
	task, err := container.NewTask(t.Context(), cio.NewCreator(cio.WithStreams(new(bytes.Buffer), io.Discard, nil), cio.WithTerminal))
	if err == nil {
		err = task.Start(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "count", "101")
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", "gpuckpt.test/terminal:1")
	k.MustRemove(t)
	log := filepath.Join(t.TempDir(), "log")
	args := []string{"restore", "gpuckpt.test/terminal:1", "--name", k.ID, "--net-host", "--snapshotter", shared.Snapshotter(), "--log-file", log}
	fails(t, shared, nil, []string{"run it with one (--tty)"}, args...)
	gpuckpt(t, shared, append(args, "--tty")...)
	r := adopt(t, shared, k.ID, k.Port)
	r.Expect(t, "count", "102")
	r.MustRemove(t)
	if text, err := os.ReadFile(log); err != nil || !strings.Contains(string(text), "102") {
		t.Errorf("the terminal's log is %q, %v", text, err)
	}
}
