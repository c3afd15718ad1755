// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package hostroot makes containers' roots out of the host's own directories: its Python with what is
// installed there, PyTorch for one, and the programs that the tests run. An image of a few small
// files is mounted full of them, so gigabytes need not be packed.
package hostroot

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// EnvPython names the Python to use.
const EnvPython = "GPUCKPT_PYTHON"

// EnvZMQ names a libzmq.so.5, for a Python without pyzmq. Its directory has what it needs.
const EnvZMQ = "GPUCKPT_TEST_ZMQ"

// usualPythons are looked at in this order; a name without a slash is found in
// PATH.
var usualPythons = []string{"python3", "/opt/torch/.venv/bin/python3", "/usr/bin/python3"}

// probe is a program that tells where its Python lies.
//
//go:embed probe.py
var probe string

// Python is one on the host.
type Python struct {
	// Executable is what to start; in a virtual environment its own link, by
	// which Python finds that.
	Executable string `json:"executable"`
	// Directories hold all that it loads.
	Directories []string `json:"directories"`
	// Versions are those of torch and torchvision, none if not asked for.
	Versions map[string]string `json:"versions"`
}

// FindPython finds a Python, with PyTorch and torchvision if so wanted. The
// error says what each that was tried lacks.
func FindPython(ctx context.Context, torch bool) (*Python, error) {
	programs := usualPythons
	if named := os.Getenv(EnvPython); named != "" {
		programs = []string{named}
	}
	var errs []error
	for _, program := range programs {
		p, err := ask(ctx, program, torch)
		if err == nil {
			return p, nil
		}
		errs = append(errs, err)
	}
	what := "Python"
	if torch {
		what = "Python with torch and torchvision"
	}
	return nil, fmt.Errorf("no %s (%s names one): %w", what, EnvPython, errors.Join(errs...))
}

// ask runs a Python and has it tell of itself.
func ask(ctx context.Context, program string, torch bool) (*Python, error) {
	args := []string{"-c", probe}
	if torch {
		args = append(args, "--torch")
	}
	out, err := exec.CommandContext(ctx, program, args...).Output()
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		lines := strings.Split(strings.TrimSpace(string(exit.Stderr)), "\n")
		return nil, fmt.Errorf("%s: %s", program, lines[len(lines)-1])
	}
	if err != nil {
		return nil, err
	}
	p := new(Python)
	if err := json.Unmarshal(out, p); err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	target, err := filepath.EvalSymlinks(p.Executable)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	p.Directories = append(p.Directories, filepath.Dir(target))
	return p, nil
}
