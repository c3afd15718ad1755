// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A log on a volume grows after a checkpoint, and gets another mode, as by fsGroup. A restore goes on at its
// end, three times over.
func TestGrownLog(t *testing.T) {
	results.Add(t)
	eachKind(t, func(t *testing.T, spec harness.RunSpec, work string) {
		spec.Mounts, spec.ID = volume(t), ""
		log := filepath.Join(spec.Mounts[0].Source, "log")
		k := shared.Work(t, spec, work, "--log", "/volume/log")
		k.Expect(t, "count", "101")
		ref := takeCheckpoint(t, shared, k, "1")
		k.Expect(t, "count", "102")
		want := "101\n102\n"
		for range 3 {
			k.MustRemove(t)
			if err := os.Chmod(log, 0o664); err != nil {
				t.Fatal(err)
			}
			k = restore(t, shared, k.ID, ref, k.Port)
			k.Expect(t, "count", "102")
			want += "102\n"
			if got, err := os.ReadFile(log); err != nil || string(got) != want {
				t.Errorf("the log is %q, %v, want %q", got, err, want)
			}
		}
	})
}

// Another file on a volume that has changed is refused by name, with its sizes and what to do; or is
// taken as it is where the container says so.
func TestChangedFile(t *testing.T) {
	results.Add(t)
	for _, accept := range []bool{false, true} {
		spec := harness.RunSpec{Mounts: volume(t)}
		file := filepath.Join(spec.Mounts[0].Source, "file")
		if accept {
			spec.ID = "testchangedfile-accepted"
			spec.Annotations = map[string]string{"dev.gpuckpt.changed-files": "accept"}
		}
		k := shared.Work(t, spec, "plain", "--file", "/volume/file")
		k.Expect(t, "count", "101")
		ref := takeCheckpoint(t, shared, k, map[bool]string{true: "accepted", false: "refused"}[accept])
		k.Expect(t, "count", "102")
		k.MustRemove(t)
		r, err := shared.Restore(t.Context(), k.ID, ref, k.Port)
		if !accept {
			harness.Says(t, err, "volume/file has bad size 8 (expect 4)", "dev.gpuckpt.changed-files=accept")
			if err := shared.Remove(t.Context(), k.ID); err != nil {
				t.Error(err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%v\n%s", err, shared.LogTail(3000))
		}
		r.RemoveAtEnd(t)
		r.Expect(t, "count", "102")
		r.Expect(t, "count", "103") // where it was: it writes over the 102 of the container that ran on
		if got, err := os.ReadFile(file); err != nil || string(got) != "101\n102\n103\n" {
			t.Errorf("the file is %q, %v", got, err)
		}
	}
}

// volume is a directory of the host that a container sees at /volume.
func volume(t *testing.T) []specs.Mount {
	return []specs.Mount{{Destination: "/volume", Source: t.TempDir(), Type: "bind", Options: []string{"rbind", "rw"}}}
}
