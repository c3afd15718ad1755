// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// What --keep prints for another terminal works as it is printed, to the counter's next answer.
func TestKeep(t *testing.T) {
	program := filepath.Join(t.TempDir(), "demo")
	if out, err := exec.Command("go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	demo := exec.CommandContext(ctx, program, "--keep")
	demo.Cancel = func() error { return demo.Process.Signal(syscall.SIGINT) }
	output, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer output.Close()
	demo.Stdout, demo.Stderr = output, output
	if err := demo.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- demo.Wait() }()
	printed := func() string {
		data, err := os.ReadFile(output.Name())
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for !strings.Contains(printed(), "# 103\n") {
		select {
		case err := <-ended:
			t.Fatalf("%v: %s", err, printed())
		case <-time.After(100 * time.Millisecond):
		}
	}
	_, lines, _ := strings.Cut(printed(), "as root:\n")
	shell := exec.CommandContext(ctx, "bash", "-e", "-c", lines)
	out, err := shell.CombinedOutput()
	if err != nil || !bytes.HasSuffix(out, []byte("\n103")) {
		t.Errorf("%v: it printed\n%s", err, out)
	}
	cancel()
	if err := <-ended; demo.ProcessState.ExitCode() != 130 {
		t.Errorf("it ended with %v: %s", err, printed())
	}
}
