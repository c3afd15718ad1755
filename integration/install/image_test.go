// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"cmp"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd/install"
)

// docs/install.md's way to install from the image once: the container writes to the node's root, asks
// the containerd there, and what it installed is what the node runs.
func TestFromImage(t *testing.T) {
	results.Add(t)
	source := cmp.Or(os.Getenv("GPUCKPT_SOURCE"), "../..") // of a bundle, or the tree
	document, err := os.ReadFile(filepath.Join(source, "docs", "install.md"))
	if err != nil {
		t.Fatal(err)
	}
	line := regexp.MustCompile(`(?m)^ctr (run .*)$`).FindStringSubmatch(string(document))
	if line == nil {
		t.Fatal("docs/install.md does not run the image")
	}
	c := session.Own(t, harness.Options{})
	programs, err := bins.Release()
	if err != nil {
		t.Fatal(err)
	}
	in := map[string]string{}
	for place, path := range programs {
		in["/opt/gpuckpt/"+place] = path
	}
	image, err := harness.BuildImage(t.Context(), harness.ImageSpec{Files: in, Entrypoint: []string{"/opt/gpuckpt/bin/gpuckpt"}})
	if err == nil {
		err = c.Import(t.Context(), "ghcr.io/gpuckpt/node:VERSION", image)
	}
	if err != nil {
		t.Fatal(err)
	}
	root := node(t, "2.4", "version = 3\nimports = []\n")
	shell(t, root)
	before := files(t, root)
	command := strings.NewReplacer("src=/,", "src="+root+",", "run ", "run --snapshotter "+c.Snapshotter()+" ").Replace(line[1])
	// The root has no systemd: a stand-in is asked to restart containerd.
	ctr := func(command string) string {
		t.Helper()
		args := strings.Fields(strings.Replace(command, "--restart", "--restart --restart-command true", 1))
		out, err := c.Output(t.Context(), "ctr", append([]string{"--address", c.Address(), "--namespace", c.Namespace()}, args...)...)
		if err != nil {
			t.Fatalf("%v\n%s", err, c.LogTail(3000))
		}
		return out
	}
	if out := ctr(command); !strings.Contains(out, "installed gpuckpt") || strings.Contains(out, "restart containerd") {
		t.Errorf("it prints %s", out)
	}
	if now := dump(t, root); !strings.Contains(now, "runtime_path = '/usr/local/bin/"+install.ShimName+"'") {
		t.Error(now)
	}
	if _, err := os.Stat(filepath.Join(root, "usr/local/lib/gpuckpt/criu/criu")); err != nil {
		t.Error(err)
	}
	ctr(strings.Replace(command, "gpuckpt install", "gpuckpt uninstall", 1))
	same(t, "removed", files(t, root), before)
}
