// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// compiledDir is where containers find the compiled programs.
const compiledDir = "/srv/cuda"

// nvcc returns the path of CUDA's compiler, which the machine of the GPU must have.
func nvcc() (string, error) {
	if path, err := exec.LookPath("nvcc"); err == nil {
		return path, nil
	}
	return exec.LookPath("/usr/local/cuda/bin/nvcc")
}

// needsNvcc skips a test of a program in CUDA C where there is no compiler for it.
func needsNvcc(t *testing.T) {
	t.Helper()
	if _, err := nvcc(); err != nil {
		t.Skipf("no CUDA C here: %v", err)
	}
}

// compiled compiles the programs in CUDA C for this machine's GPU, once, and returns the directory
// of the results.
var compiled = sync.OnceValues(func() (string, error) {
	compiler, err := nvcc()
	if err != nil {
		return "", err
	}
	dir, err := os.MkdirTemp("", "gpuckpt-cuda-")
	if err != nil {
		return "", err
	}
	atEnd(func() error { return os.RemoveAll(dir) })
	source := filepath.Join(dir, "source")
	if err := os.CopyFS(source, programs.Sources); err != nil {
		return "", err
	}
	files, err := fs.Glob(programs.Sources, "*.cu")
	if err != nil {
		return "", err
	}
	var all errgroup.Group
	for _, file := range files {
		all.Go(func() error {
			program := filepath.Join(dir, strings.TrimSuffix(file, ".cu"))
			out, err := exec.Command(compiler, "-O2", "-std=c++17", "-arch=native", "-o", program, filepath.Join(source, file)).CombinedOutput()
			if err != nil {
				return fmt.Errorf("nvcc %s: %w\n%s", file, err, out)
			}
			return nil
		})
	}
	return dir, all.Wait()
})
