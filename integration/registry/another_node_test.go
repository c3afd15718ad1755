// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// carryEnv names a directory that goes from one machine to another. Without it
// both nodes are on this machine.
const carryEnv = "GPUCKPT_CARRY"

// A program that was checkpointed on one node goes on on another, which has had
// nothing of it: another containerd, and with GPUCKPT_CARRY another machine with
// another GPU. The first run with the variable leaves the image in the
// directory; a run that finds one there goes on with it.
func TestAnotherNode(t *testing.T) {
	result := results.Add(t)
	dir, between := os.LookupEnv(carryEnv)
	if !between {
		dir = t.TempDir()
	}
	archive, portFile := filepath.Join(dir, "job.tar"), filepath.Join(dir, "port")
	if _, err := os.Stat(archive); errors.Is(err, os.ErrNotExist) {
		depart(t, archive, portFile)
		if between {
			t.Logf("the image is in %s; run this on the other node", archive)
			return
		}
	}
	text, err := os.ReadFile(portFile)
	if err != nil {
		t.Fatal(err)
	}
	port, err := strconv.Atoi(string(text))
	if err != nil {
		t.Fatal(err)
	}

	there := session.Own(t, harness.Options{ShimConfig: fmt.Sprintf("[restore]\nkeys = [%q]\n", dir)})
	const ref = "gpuckpt.test/arrived:1"
	gpuckpt(t, there, "image", "convert", archive, ref)
	gpuckpt(t, there, "image", "verify", ref)
	t.Log(gpuckpt(t, there, "image", "inspect", ref)) // names the GPU it was on
	var r *harness.Container
	if err := result.Time("resume", func() error { r = resume(t, there, ref, port); return nil }); err != nil {
		t.Fatal(err)
	}
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "103")
	r.MustRemove(t)
}

// depart checkpoints a program and writes the image to a file.
func depart(t *testing.T, archive, portFile string) {
	t.Helper()
	here := session.Own(t, harness.Options{})
	k := start(t, here, harness.RunSpec{}, "pattern", "--bytes", "1M", "--seed", "7")
	k.Expect(t, "count", "101")
	k.Expect(t, "count", "102")
	const ref = "gpuckpt.test/departs:1"
	gpuckpt(t, here, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	gpuckpt(t, here, "image", "convert", ref, "oci-archive:"+archive)
	key, _, err := try(t, here, nil, "key", "show")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(filepath.Dir(archive), "departs.pub"), []byte(key), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(portFile, []byte(strconv.Itoa(k.Port)), 0o600); err != nil {
		t.Fatal(err)
	}
}
