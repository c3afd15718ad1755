// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
	"github.com/gpuckpt/gpuckpt/internal/guard"
)

// without is the file of the rules that the shim that believes images leaves out; no file leaves out all.
var without string

// Each attack is refused by its own rule: with that one taken away, and all others in place, it comes
// through to CRIU. What stops it there is CRIU itself, its sandbox or the inspection; nothing of the host
// is changed.
func TestEachRule(t *testing.T) {
	z := newZoo(t, shared)
	g := z.newCage(t, 0)
	c := newCanaries(t)
	c.keep(t, func() {
		if wrong, failed := g.Restore(t, "", nil); failed != nil || len(wrong) > 0 {
			t.Fatal(failed, wrong)
		}
	})
	t.Cleanup(func() {
		if err := os.Remove(without); err != nil {
			t.Error(err)
		}
	})
	good := g.dir
	for _, a := range imagetest.Attacks() {
		if !a.Known && os.Getenv(envChanges) != "all" {
			continue // make test-hostile has them
		}
		t.Run(a.Name, func(t *testing.T) {
			g.dir = t.TempDir()
			if out, err := exec.Command("cp", "-a", good+"/.", g.dir).CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if err := a.Apply(g.dir); err != nil {
				t.Fatal(err)
			}
			if err := guard.Images(t.Context(), z.spec, criu.Open(g.dir), t.TempDir()); a.Says != "" && (err == nil || !strings.Contains(err.Error(), a.Says)) {
				t.Errorf("with its rule: %v, want %q", err, a.Says)
			}
			if err := os.WriteFile(without, []byte(strings.ReplaceAll(a.Rule, ",", "\n")+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			wrong, failed := g.Restore(t, "", nil)
			if failed == nil {
				failed = errors.New("it is restored")
			}
			for _, words := range []string{"does not fit the container's spec", "gpuckpt does not restore it", "damaged checkpoint"} {
				if strings.Contains(failed.Error(), words) {
					t.Errorf("without %s it does not come to CRIU: %v", a.Rule, failed)
				}
			}
			if len(wrong) > 0 {
				t.Error(wrong)
			}
			if changed := c.Changed(); len(changed) > 0 {
				t.Error(changed)
				c.Accept() // it is no other attack's
			}
			t.Logf("without %s: %v", a.Rule, failed)
		})
	}
}
