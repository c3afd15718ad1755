// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/console"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// onTerminal runs gpuckpt with its standard error on a terminal, and gives what
// it showed there.
func onTerminal(t *testing.T, args ...string) (shown string, err error) {
	t.Helper()
	pty, name, err := console.NewPty()
	if err != nil {
		t.Fatal(err)
	}
	defer pty.Close()
	if err := pty.Resize(console.WinSize{Height: 25, Width: 120}); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute) // a display that never ends
	defer cancel()
	cmd := command(ctx, t, shared, nil, args...)
	cmd.Stderr = slave
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	slave.Close()
	text := make(chan string)
	go func() {
		data, _ := io.ReadAll(pty) // ends with EIO when nobody has the other end
		text <- string(data)
	}()
	err = cmd.Wait()
	return <-text, err
}

// On a terminal there are bars, which end with the command, whether it succeeds
// or not; elsewhere lines; with --quiet nothing.
func TestProgress(t *testing.T) {
	s := serve(t, false)
	k := start(t, shared, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "5")
	ref := s.ref("job:1")
	shown, err := onTerminal(t, "checkpoint", k.ID, "--image", ref, "--leave-running")
	if err != nil || !strings.Contains(shown, "image") || !strings.Contains(shown, "MiB") || !strings.Contains(shown, "done") {
		t.Errorf("a checkpoint on a terminal: %v, %q", err, shown)
	}
	if shown, err = onTerminal(t, "image", "push", ref); err != nil || !strings.Contains(shown, "MiB") {
		t.Errorf("a push on a terminal: %v, %q", err, shown)
	}
	s.breakAfter.Store(1000)
	if shown, err = onTerminal(t, "image", "push", ref, s.ref("other:1"), "--attempts", "2"); err == nil || !strings.Contains(shown, "trying again") {
		t.Errorf("a push that fails on a terminal: %v, %q", err, shown)
	}
	s.breakAfter.Store(-1)
	_, errs, err := try(t, shared, nil, "image", "verify", ref)
	if err != nil || !strings.HasPrefix(errs, "verify: read in ") || strings.ContainsRune(errs, '\x1b') {
		t.Errorf("a verify without a terminal: %v, %q", err, errs)
	}
	for flag, line := range map[string]string{"--quiet": "nothing", "--json": `{"step":"verify",`} { // that of a verify of over a second
		_, errs, err := try(t, shared, nil, "image", "verify", ref, flag)
		for said := range strings.Lines(errs) {
			if !strings.HasPrefix(said, line) {
				t.Errorf("with %s it says %q", flag, said)
			}
		}
		if err != nil {
			t.Errorf("with %s: %v", flag, err)
		}
	}
}

// A shell completes containers and images.
func TestCompletion(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	for _, c := range []struct{ line, want string }{
		{"checkpoint ", k.ID}, {"suspend ", k.ID}, {"resume ", k.ID},
		{"checkpoint x --previous ", harness.WorkloadImage}, {"image inspect ", harness.WorkloadImage}, {"image build ./dump x --base ", harness.WorkloadImage},
		{"doctor --image ", harness.WorkloadImage}, {"checkpoint x --compression ", "zstd"},
	} {
		args := append([]string{"__complete"}, strings.Split(c.line, " ")...)
		if out := strings.Fields(gpuckpt(t, shared, args...)); !slices.Contains(out, c.want) {
			t.Errorf("%q completes to %q, not %q", c.line, out, c.want)
		}
	}
}
