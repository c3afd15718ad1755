// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

const controlDir = "/run/vllm-startup"

// A program that waits as vLLM does is checkpointed when it says that it is ready, and serves only once the hook that
// is shipped for vLLM has activated it: the one that was checkpointed and two that are restored at once, each with an
// identity and a port of its own. With -count=20 it is twenty captures.
func TestStartupCapture(t *testing.T) {
	results.Add(t)
	needsPython(t)
	k := start(t, false, waiting(t, "", "donor"), "vllm_startup.py", "--control-dir", controlDir)
	ref := "checkpoint.test/" + k.ID + ":1"
	var answer any
	if err := shared.Gpuckpt(t.Context(), &answer, "checkpoint", k.ID, "--image", ref, "--leave-running",
		"--wait-for", controlDir+"/capture-ready.json"); err != nil {
		t.Fatalf("%v\n%s", err, tail(k.Logs()))
	}
	forgetAtEnd(t, ref)
	all := []*harness.Container{k, nil, nil}
	var both sync.WaitGroup
	for i, name := range []string{"one", "two"} {
		spec := waiting(t, ref, name)
		both.Go(func() {
			var err error
			if all[i+1], err = shared.Run(t.Context(), spec); err != nil {
				t.Error(err)
			}
		})
	}
	both.Wait()
	seen := make(map[string]bool)
	for i, k := range all {
		if k == nil {
			continue
		}
		k.RemoveAtEnd(t)
		got, err := k.Ask(t.Context(), "who")
		who := strings.Fields(got)
		kind := "copy"
		if i == 0 {
			kind = "donor"
		}
		if err != nil || len(who) != 3 || who[0] != kind || who[2] != "True" || seen[who[1]] {
			t.Errorf("%s answers %q, %v, after %v\n%s", k.ID, got, err, seen, tail(k.Logs()))
		} else {
			seen[who[1]] = true
		}
	}
	// One that was activated is so in a checkpoint of it too.
	was, err := k.Ask(t.Context(), "who")
	if err != nil {
		t.Fatal(err)
	}
	again := "checkpoint.test/" + k.ID + ":2"
	if err := shared.Gpuckpt(t.Context(), &answer, "checkpoint", k.ID, "--image", again); err != nil {
		t.Fatal(err)
	}
	forgetAtEnd(t, again)
	spec := waiting(t, again, "three")
	spec.Port = k.Port
	k.MustRemove(t)
	r, err := shared.Run(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	r.RemoveAtEnd(t)
	if is, err := r.Ask(t.Context(), "who"); is != was {
		t.Errorf("after another checkpoint it answers %q, %v, and did %q", is, err, was)
	}
}

// A restored server that does not prove itself ends with its own words.
func TestStartupCaptureFails(t *testing.T) {
	results.Add(t)
	needsPython(t)
	k := start(t, false, waiting(t, "", "donor"), "vllm_startup.py", "--fail", "--control-dir", controlDir)
	ref := "checkpoint.test/" + k.ID + ":1"
	var answer any
	if err := shared.Gpuckpt(t.Context(), &answer, "checkpoint", k.ID, "--image", ref,
		"--wait-for", controlDir+"/capture-ready.json"); err != nil {
		t.Fatalf("%v\n%s", err, tail(k.Logs()))
	}
	forgetAtEnd(t, ref)
	k.MustRemove(t)
	r, err := shared.Run(t.Context(), waiting(t, ref, "copy"))
	if err == nil {
		r.RemoveAtEnd(t)
	}
	harness.Says(t, err, "hook after-restore", "other tokens than before")
}

// waiting is the container of such a program, or of one that is restored of an image.
func waiting(t *testing.T, image, name string) harness.RunSpec {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	script, err := filepath.Abs(filepath.Join(cmp.Or(os.Getenv("GPUCKPT_SOURCE"), "../.."), "deploy/vllm/activate.py")) // of a bundle, or the tree
	if err != nil {
		t.Fatal(err)
	}
	const inside = "/srv/activate.py"
	hook := func(more ...string) string {
		text, err := json.Marshal(append([]string{host.Executable, inside, controlDir, "--port", fmt.Sprint(port)}, more...))
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	spec := harness.RunSpec{ID: harness.Name(t) + "-" + name, Port: port, Annotations: map[string]string{
		"dev.gpuckpt.hook.after-checkpoint":         hook("--donor"),
		"dev.gpuckpt.hook.after-restore":            hook(),
		"dev.gpuckpt.hook.after-restore.on-failure": "refuse",
	}}
	spec.Amend = append(spec.Amend, oci.WithMounts([]specs.Mount{{
		Type: "bind", Source: script, Destination: inside, Options: []string{"bind", "ro", "rprivate"},
	}}))
	if image != "" {
		spec.Image, spec.Annotations[annotations.Restore] = image, "true"
		if spec.Mounts, err = importImage(); err != nil {
			t.Fatal(err)
		}
	}
	return spec
}
