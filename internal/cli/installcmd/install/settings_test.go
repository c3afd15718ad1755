// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What configures a node is written as Kubernetes has it in a pod, changed and taken away with it, and
// gone with the rest. What is wrong, or somebody else's, changes nothing.
func TestSettings(t *testing.T) {
	root, from := t.TempDir(), t.TempDir()
	before := tree(t, root)
	o := Options{Root: root, Source: release(t, "1"), WithoutContainerd: true, Settings: from}
	install := func() error {
		_, err := Install(t.Context(), o)
		return err
	}
	volume := func(dir, file, text string) { // as the kubelet makes it
		t.Helper()
		dir = filepath.Join(from, dir)
		put(t, filepath.Join(dir, "..1", file), text, 0o600)
		_ = os.Symlink("..1", filepath.Join(dir, "..data"))
		_ = os.Symlink("..data/"+file, filepath.Join(dir, file))
	}
	put(t, filepath.Join(from, "config.toml"), "driver_root = \"/run/nvidia/driver\"\n", 0o600)
	volume("keys/one", "a.pub", "A")
	volume("keys/two", "b.pub", "B")
	volume("recipients/r", "r.pub", "R")
	volume("decryption-keys/d", "d.key", "D")
	if err := install(); err != nil {
		t.Fatal(err)
	}
	is := func(want map[string]string) {
		t.Helper()
		got := tree(t, filepath.Join(root, "etc"))
		maps.DeleteFunc(got, func(_, text string) bool { return strings.HasPrefix(text, "d") })
		same(t, "settings", got, want)
	}
	all := map[string]string{
		"/gpuckpt/config.toml": "-rw-r--r-- driver_root = \"/run/nvidia/driver\"\n", "/gpuckpt/keys/a.pub": "-rw-r--r-- A", "/gpuckpt/keys/b.pub": "-rw-r--r-- B",
		"/gpuckpt/recipients/r.pub": "-rw-r--r-- R", "/containerd/ocicrypt/keys/d.key": "-rw------- D",
	}
	is(all)
	volume("keys/three", "a.pub", "another")
	if err := install(); err == nil || !strings.Contains(err.Error(), "two files are called a.pub") {
		t.Error(err)
	}
	is(all)
	if err := os.RemoveAll(filepath.Join(from, "keys/three")); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(from, "config.toml"), "driver_rot = 1\n", 0o600)
	if err := install(); err == nil || !strings.Contains(err.Error(), "driver_rot") {
		t.Error(err)
	}
	is(all)
	put(t, filepath.Join(from, "config.toml"), "lock_timeout = \"20s\"\n", 0o600)
	volume("keys/two", "b.pub", "C")
	for _, gone := range []string{"keys/one", "decryption-keys/d"} {
		if err := os.RemoveAll(filepath.Join(from, gone)); err != nil {
			t.Fatal(err)
		}
	}
	if err := install(); err != nil {
		t.Fatal(err)
	}
	now := map[string]string{"/gpuckpt/config.toml": "-rw-r--r-- lock_timeout = \"20s\"\n", "/gpuckpt/keys/b.pub": "-rw-r--r-- C", "/gpuckpt/recipients/r.pub": "-rw-r--r-- R"}
	is(now)
	o.Settings = "" // left alone
	if err := install(); err != nil {
		t.Fatal(err)
	}
	is(now)
	put(t, filepath.Join(root, agentKeys, "node.pub"), "N", 0o600)
	if _, err := Uninstall(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	same(t, "removed", tree(t, root), before)

	put(t, filepath.Join(root, "etc/gpuckpt/config.toml"), "lock_timeout = \"30s\"\n", 0o600)
	o.Settings = from
	if err := install(); err == nil || !strings.Contains(err.Error(), "is not of this installer") {
		t.Error(err)
	}
	is(map[string]string{"/gpuckpt/config.toml": "-rw------- lock_timeout = \"30s\"\n"})
}
