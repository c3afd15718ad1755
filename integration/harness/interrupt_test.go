// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// interruptedCode is the exit code of the program that TestInterrupt interrupts.
const interruptedCode = 42

// TestMain is that program when the environment asks for it: it starts an
// instance, says where, and waits for a signal.
func TestMain(m *testing.M) {
	if os.Getenv("HARNESS_TEST_INTERRUPT") == "" {
		os.Exit(m.Run())
	}
	os.Exit(Interruptible(func(ctx context.Context) int {
		bins, err := FindBins()
		if err != nil {
			fmt.Println(err)
			return 1
		}
		c, err := Start(ctx, Options{Bins: bins})
		if err != nil {
			fmt.Println(err)
			return 1
		}
		fmt.Println(c.Dir())
		<-ctx.Done()
		if err := c.Stop(); err != nil {
			fmt.Println(err)
			return 1
		}
		return interruptedCode
	}))
}

// Ctrl-C in a program that uses the harness leaves nothing on the machine.
func TestInterrupt(t *testing.T) {
	if _, err := FindBins(); err != nil || os.Geteuid() != 0 {
		t.Skip("no programs or no root: ", err)
	}
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(signal.String(), func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "HARNESS_TEST_INTERRUPT=1")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(out)
			lines.Scan()
			dir := strings.TrimSpace(lines.Text())
			if _, err := os.Stat(dir); err != nil {
				t.Fatalf("the program says %q: %v", dir, err)
			}
			if err := cmd.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			for lines.Scan() {
				t.Error(lines.Text())
			}
			_ = cmd.Wait()
			if code := cmd.ProcessState.ExitCode(); code != interruptedCode {
				t.Errorf("the program ended with %s", cmd.ProcessState)
			}
			if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left: %v", dir, err)
			}
			if processes := (home{dir: dir}).processes(); len(processes) != 0 {
				t.Errorf("processes left: %v", processes)
			}
		})
	}
}
