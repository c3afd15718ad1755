// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// CRIU takes the second mount of one directory for one that has the flags of the first. It has them
// all the same, and so it is no reason to refuse the restore.
func TestMountedTwice(t *testing.T) {
	results.Add(t)
	source := t.TempDir()
	if err := os.Mkdir(filepath.Join(source, "within"), 0o755); err != nil {
		t.Fatal(err)
	}
	const flags = "ro,nosuid,nodev,noexec"
	bind := func(source, at, flags string) specs.Mount {
		return specs.Mount{Type: "bind", Source: source, Destination: at, Options: append([]string{"rbind"}, strings.Split(flags, ",")...)}
	}
	mounts := []specs.Mount{bind(source, "/one", flags), bind(source, "/two", flags), bind(filepath.Join(source, "within"), "/three", flags), bind(source, "/four", "nosuid,nodev")}
	for i, source := range []string{"/tmp", "/proc"} { // where CRIU itself may write
		mounts = append(mounts, specs.Mount{Type: "bind", Source: source, Destination: []string{"/five", "/six"}[i], Options: append([]string{"bind"}, strings.Split(flags, ",")...)})
	}
	k := shared.Work(t, harness.RunSpec{Mounts: mounts, CtrFlags: []string{"--cap-drop", "CAP_SYS_ADMIN"}}, "plain")
	k.Expect(t, "count", "101")
	ref := takeCheckpoint(t, shared, k, "1")
	k.MustRemove(t)
	r := restore(t, shared, k.ID, ref, k.Port)
	r.Expect(t, "count", "102")
	file, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", r.MustPid(t)))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	have, err := mountinfo.GetMountsFromReader(file, nil)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, m := range have {
		for _, want := range mounts {
			if m.Mountpoint != want.Destination {
				continue
			}
			found++
			options := strings.Split(m.Options, ",")
			for _, flag := range []string{"ro", "nosuid", "nodev", "noexec"} {
				if has, wanted := strings.Contains(","+strings.Join(options, ",")+",", ","+flag+","), strings.Contains(strings.Join(want.Options, ","), flag); has != wanted {
					t.Errorf("%s has the options %s, want %v", m.Mountpoint, m.Options, want.Options)
				}
			}
		}
	}
	if found != len(mounts) {
		t.Errorf("%d of %d mounts are there", found, len(mounts))
	}
}
