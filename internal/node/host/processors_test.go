// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

func TestCPUQuota(t *testing.T) {
	for name, test := range map[string]struct {
		files map[string]string
		want  float64
	}{
		"version 2":           {map[string]string{"pod/job/cpu.max": "250000 100000\n"}, 2.5},
		"version 2, none":     {map[string]string{"pod/job/cpu.max": "max 100000\n"}, 0},
		"version 2, above":    {map[string]string{"pod/job/cpu.max": "800000 100000\n", "pod/cpu.max": "50000 100000\n"}, 0.5},
		"version 2, not here": {map[string]string{"pod/job/cpu.max": "max 100000\n", "pod/cpu.max": "300000 100000\n"}, 3},
		"version 1":           {map[string]string{"pod/job/cpu.cfs_quota_us": "200000\n", "pod/job/cpu.cfs_period_us": "100000\n"}, 2},
		"version 1, none":     {map[string]string{"pod/job/cpu.cfs_quota_us": "-1\n", "pod/job/cpu.cfs_period_us": "100000\n"}, 0},
		"no cgroup":           {nil, 0},
		"damaged":             {map[string]string{"pod/job/cpu.max": "100000 0\n", "pod/cpu.max": "\n"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, text := range test.files {
				if err := os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := cpuQuota(root, "/pod/job"); got != test.want {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

// Whoever comes first and last, all processors are used while anybody needs them.
func TestAllProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	using := func(want int) {
		t.Helper()
		if n := runtime.GOMAXPROCS(0); n != want {
			t.Fatalf("the process uses %d processors, want %d", n, want)
		}
	}
	first := AllProcessors()
	using(runtime.NumCPU())
	second := AllProcessors()
	first()
	using(runtime.NumCPU())
	second()
	using(1)
	AllProcessors()()
	using(1)
}
