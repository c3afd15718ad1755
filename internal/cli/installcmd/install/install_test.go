// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// release makes a directory like that of a release, of a version.
func release(t *testing.T, version string, more ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range append([]string{"bin/gpuckpt", "bin/" + ShimName, "lib/gpuckpt/gpuckpt_criu.so", "lib/gpuckpt/criu/criu"}, more...) {
		put(t, filepath.Join(dir, name), version+" "+name, 0o755)
	}
	if err := os.Symlink("gpuckpt", filepath.Join(dir, "bin/cuda-checkpoint")); err != nil {
		t.Fatal(err)
	}
	return dir
}

func put(t *testing.T, path, text string, mode fs.FileMode) {
	t.Helper()
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, []byte(text), mode)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// tree is all that is in a directory: files with mode and content, links, directories.
func tree(t *testing.T, root string) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		st, err := d.Info()
		if err != nil {
			return err
		}
		text := ""
		switch {
		case d.Type() == fs.ModeSymlink:
			text, err = os.Readlink(path)
		case !d.IsDir():
			var data []byte
			data, err = os.ReadFile(path)
			text = string(data)
		}
		found[strings.TrimPrefix(path, root)] = st.Mode().String() + " " + text
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func same(t *testing.T, what string, got, want map[string]string) {
	t.Helper()
	for path, text := range want {
		if got[path] != text {
			t.Errorf("%s: %s is %q, want %q", what, path, got[path], text)
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			t.Errorf("%s: %s is left", what, path)
		}
	}
}

// What was installed is there, a second run changes nothing, a newer release replaces it, and
// nothing is left when it is removed.
func TestPrograms(t *testing.T) {
	root := t.TempDir()
	put(t, filepath.Join(root, "usr/local/bin/other"), "another's", 0o755)
	cgroups := filepath.Join(root, "sys/fs/cgroup/memory")
	put(t, filepath.Join(cgroups, "cgroup.procs"), "", 0o644)
	put(t, filepath.Join(root, "run/other"), "", 0o644)
	before := tree(t, root)
	o := Options{Root: root, Source: release(t, "1", "lib/gpuckpt/old.so"), WithoutContainerd: true}
	r, err := Install(t.Context(), o)
	if err != nil || r.Prefix != "/usr/local" || r.Restart {
		t.Fatalf("%+v, %v", r, err)
	}
	shim := filepath.Join(root, "usr/local/bin", ShimName)
	running, err := os.Open(shim) // as a shim that runs holds its program
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()
	installed := tree(t, root)
	if r, err := Install(t.Context(), o); err != nil || len(r.Changed) != 0 {
		t.Errorf("a second time: %+v, %v", r, err)
	}
	same(t, "a second time", tree(t, root), installed)
	if r, err := Install(t.Context(), Options{Root: root, Source: filepath.Join(root, "usr/local"), WithoutContainerd: true}); err != nil || len(r.Changed) != 0 {
		t.Errorf("by what is installed: %+v, %v", r, err)
	}
	same(t, "by what is installed", tree(t, root), installed)

	// Two at once would have the same temporary names. What one that was killed has left locks nobody out.
	put(t, filepath.Join(root, lockFile), "", 0o600)
	lock, err := os.Open(filepath.Join(root, lockFile))
	if err != nil || unix.Flock(int(lock.Fd()), unix.LOCK_EX) != nil {
		t.Fatal(err)
	}
	_, err = Install(t.Context(), o)
	if _, uerr := Uninstall(t.Context(), o); err == nil || uerr == nil || !strings.Contains(err.Error(), "another gpuckpt install or uninstall is at work on this node") {
		t.Errorf("a second one at once: %v, %v", err, uerr)
	}
	if err := lock.Close(); err != nil {
		t.Fatal(err)
	}

	o.Source = release(t, "2")
	if r, err := Install(t.Context(), o); err != nil || len(r.Changed) != 5 { // four new, one gone
		t.Errorf("the next version: %+v, %v", r, err)
	}
	if data, err := os.ReadFile(shim); err != nil || !strings.HasPrefix(string(data), "2 ") {
		t.Errorf("the shim is %q, %v", data, err)
	}
	if _, err := os.Stat(filepath.Join(root, "usr/local/lib/gpuckpt/old.so")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file of the last version: %v", err)
	}
	if data := make([]byte, 2); true {
		if _, err := running.ReadAt(data, 0); err != nil || string(data) != "1 " {
			t.Errorf("who runs the shim has %q of it, %v", data, err)
		}
	}
	// What the first checkpoint makes.
	put(t, filepath.Join(root, "run/gpuckpt/criu"), "", 0o600)
	put(t, filepath.Join(root, "run/gpuckpt/network-lock"), "", 0o600)
	for _, dir := range []string{"sys/fs/cgroup/memory/gpuckpt", "run/gpuckpt/quota/memory:gpuckpt", "var/lib/gpuckpt/records/k8s.io", "var/lib/gpuckpt/checkpoints"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Uninstall(t.Context(), o); err != nil {
		t.Error(err)
	}
	same(t, "removed", tree(t, root), before)
	if r, err := Uninstall(t.Context(), o); err != nil || r.Prefix != "" {
		t.Errorf("removed again: %+v, %v", r, err)
	}
}

// What shims have left something in stays, all else of theirs goes.
func TestLeft(t *testing.T) {
	root := t.TempDir()
	o := Options{Root: root, Source: release(t, "1"), WithoutContainerd: true, Prefix: "/opt"}
	if _, err := Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(root, "var/lib/gpuckpt/records/default/job.json"), "{}", 0o600)
	put(t, filepath.Join(root, "var/lib/gpuckpt/records/stray"), "", 0o600)
	put(t, filepath.Join(root, "var/lib/gpuckpt/checkpoints/1/inventory.img"), "", 0o600)
	put(t, filepath.Join(root, "run/gpuckpt/quota/memory:gpuckpt/claim-1"), "", 0o600)
	want := tree(t, root)
	for path := range want {
		if strings.HasPrefix(path, "/opt") || strings.HasSuffix(path, "installed.json") {
			delete(want, path)
		}
	}
	if err := os.MkdirAll(filepath.Join(root, "var/lib/gpuckpt/records/k8s.io"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := Uninstall(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	same(t, "uninstalled", tree(t, root), want)
}

// Where a prefix cannot be written the next one is taken.
func TestPrefix(t *testing.T) {
	root := t.TempDir()
	put(t, filepath.Join(root, "usr/local"), "no directory", 0o600) // as a file system that is read-only
	r, err := Install(t.Context(), Options{Root: root, Source: release(t, "1"), WithoutContainerd: true})
	if err != nil || r.Prefix != "/opt/gpuckpt" {
		t.Errorf("%+v, %v", r, err)
	}
}

// A node without containerd is told what to do.
func TestNoContainerd(t *testing.T) {
	_, err := Install(t.Context(), Options{Root: t.TempDir(), Source: release(t, "1")})
	if err == nil || !strings.Contains(err.Error(), "--without-containerd") {
		t.Error(err)
	}
}

// A containerd that shows its configuration as one of version 2 is of before 2.0.
func TestOldContainerd(t *testing.T) {
	program := filepath.Join(t.TempDir(), "containerd")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho version = 2\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, err := (Options{Root: "/", Containerd: program}).plain(t.Context(), nil, "/nowhere/config.toml"); err == nil || !strings.Contains(err.Error(), "2.2 or newer") {
		t.Error(err)
	}
}

// A source that is no release changes nothing.
func TestNoRelease(t *testing.T) {
	root := t.TempDir()
	if _, err := Install(t.Context(), Options{Root: root, Source: t.TempDir(), WithoutContainerd: true}); err == nil || !strings.Contains(err.Error(), "is no release of gpuckpt") {
		t.Error(err)
	}
	same(t, "refused", tree(t, root), map[string]string{"": tree(t, root)[""]})
}

// An installation that fails leaves the node as it was, with the version before if there was one, and says so.
func TestFails(t *testing.T) {
	root, settings := t.TempDir(), t.TempDir()
	put(t, filepath.Join(root, distributions[0], "config.toml"), "version = 3\n", 0o600)
	put(t, filepath.Join(settings, "config.toml"), "no = 'setting'\n", 0o600)
	for _, step := range []struct{ version, settings, said string }{{"1", settings, "the node is as it was"}, {"1", "", ""}, {"2", settings, "stays installed"}, {"2", "", ""}} {
		before := tree(t, root)
		o := Options{Root: root, Source: release(t, step.version, "lib/gpuckpt/of-"+step.version), Settings: step.settings}
		_, err := Install(t.Context(), o)
		if step.said == "" {
			if err != nil {
				t.Fatal(err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), step.said) {
			t.Errorf("version %s: %v", step.version, err)
		}
		same(t, "version "+step.version+" failed", tree(t, root), before)
	}
}

// What cannot be put back is said, and stays in the record.
func TestCannotPutBack(t *testing.T) {
	dir := t.TempDir()
	o := Options{
		Root: "/", Source: release(t, "1"), Prefix: filepath.Join(dir, "opt"), Config: filepath.Join(dir, "agent/etc/containerd/config.toml"),
		Record: filepath.Join(dir, "record"), Restart: true,
	}
	program := filepath.Join(o.Prefix, "bin/gpuckpt")
	o.RestartCommand = "rm -f " + program + "; mkdir -p " + program + "/other; false"
	if err := os.RemoveAll(filepath.Join(o.Source, "lib/gpuckpt/criu")); err != nil { // the link to it is below no prefix
		t.Fatal(err)
	}
	_, err := Install(t.Context(), o)
	if err == nil || strings.Contains(err.Error(), "as it was") || !strings.Contains(err.Error(), "remove "+program) {
		t.Error(err)
	}
	if r, err := o.readRecord(); err != nil || !slices.Contains(r.Files, program) {
		t.Errorf("the record has %+v, %v", r, err)
	}
}

// One that is killed while containerd is to be restarted leaves nothing that the next does not mend or remove.
func TestKilled(t *testing.T) {
	dir := t.TempDir()
	config, record, restarts := filepath.Join(dir, "agent/etc/containerd/config.toml"), filepath.Join(dir, "record"), filepath.Join(dir, "restarts")
	put(t, config, "version = 3\n", 0o600)
	before := tree(t, dir)
	o := Options{
		Root: "/", Source: release(t, "1"), Prefix: filepath.Join(dir, "opt"), Config: config, Record: record,
		Restart: true, RestartCommand: "cp " + record + " " + restarts,
	}
	if err := os.RemoveAll(filepath.Join(o.Source, "lib/gpuckpt/criu")); err != nil { // the link to it is below no prefix
		t.Fatal(err)
	}
	if _, err := Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	installed := tree(t, dir)
	if err := os.Rename(restarts, record); err != nil { // as it was meanwhile
		t.Fatal(err)
	}
	put(t, filepath.Join(dir, "opt/bin/.gpuckpt.gpuckpt-new"), "a half", 0o600)
	put(t, filepath.Join(dir, "opt/bin/.gpuckpt.gpuckpt-old"), "the last", 0o600)
	half := filepath.Join(filepath.Dir(config), ".config-v3.toml.tmpl.gpuckpt-new")
	put(t, half, "a half", 0o600)
	if r, err := Install(t.Context(), o); err != nil || r.Restart {
		t.Errorf("%+v, %v", r, err)
	}
	same(t, "again", tree(t, dir), installed)
	put(t, half, "a half", 0o600)
	put(t, filepath.Join(dir, ".record.gpuckpt-new"), "a half", 0o600)
	if err := os.Remove(restarts); err != nil {
		t.Fatal("containerd was not restarted")
	}
	if _, err := Install(t.Context(), o); err != nil {
		t.Error(err)
	}
	o.Restart = false
	if _, err := Uninstall(t.Context(), o); err != nil {
		t.Error(err)
	}
	same(t, "removed", tree(t, dir), before)
}

// One that is killed while it copies is removed, too.
func TestKilledWhileItCopies(t *testing.T) {
	root := t.TempDir()
	put(t, filepath.Join(root, "usr/local/bin/other"), "another's", 0o755)
	before := tree(t, root)
	o := Options{Root: root, Source: release(t, "1"), WithoutContainerd: true}
	fifo := filepath.Join(o.Source, "lib/gpuckpt/slow")
	if err := unix.Mkfifo(fifo, 0o644); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = Install(t.Context(), o)
	}()
	at, err := os.OpenFile(fifo, os.O_WRONLY, 0) // when it is read
	if err == nil {
		_, err = Uninstall(t.Context(), o)
	}
	if err != nil {
		t.Fatal(err)
	}
	same(t, "removed", tree(t, root), before)
	_ = at.Close()
	<-ended
}

// When containerd may have read what is new, that stays, and the record has what the version before has left.
func TestFailsAtItsEnd(t *testing.T) {
	root := t.TempDir()
	before := tree(t, root)
	install := func(version string) error {
		_, err := Install(t.Context(), Options{Root: root, Source: release(t, version, "lib/gpuckpt/of-"+version), WithoutContainerd: true})
		return err
	}
	if err := install("1"); err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(root, "usr/local/lib/gpuckpt/of-1")
	if err := os.Remove(left); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(left, "in the way"), "", 0o644)
	if err := install("2"); err == nil || !strings.Contains(err.Error(), "stays installed") {
		t.Error(err)
	}
	if data, err := os.ReadFile(filepath.Join(root, "usr/local/bin", ShimName)); string(data) != "2 bin/"+ShimName {
		t.Errorf("%q, %v", data, err)
	}
	if err := os.Remove(filepath.Join(left, "in the way")); err != nil {
		t.Fatal(err)
	}
	if _, err := Uninstall(t.Context(), Options{Root: root}); err != nil {
		t.Error(err)
	}
	same(t, "removed", tree(t, root), before)
}

// Containers that run with the shim keep it.
func TestInUse(t *testing.T) {
	root := t.TempDir()
	o := Options{Root: root, Source: release(t, "1"), WithoutContainerd: true}
	if _, err := Install(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Join(root, "proc/7/comm"), "shim", 0o600)
	if err := os.Symlink("/usr/local/bin/"+ShimName+" (deleted)", filepath.Join(root, "proc/7/exe")); err != nil {
		t.Fatal(err)
	}
	if _, err := Uninstall(t.Context(), o); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "pid 7") {
		t.Errorf("in use: %v", err)
	}
	o.Force = true
	if _, err := Uninstall(t.Context(), o); err != nil {
		t.Error(err)
	}
}

// k3s and RKE2 generate containerd's configuration: from a template, or with imports.
func TestGenerated(t *testing.T) {
	const user = "{{ template \"base\" . }}\n\n[debug]\n  level = 'debug'\n"
	for _, c := range []struct {
		name, dir, config, template string
		file                        string
		words                       []string
	}{
		{name: "k3s with imports", dir: distributions[0], config: "version = 3\nimports = ['" + distributions[0] + "/config-v3.toml.d/*.toml']\n[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]\nSystemdCgroup = true\n",
			file: "config-v3.toml.d/gpuckpt.toml", words: []string{"version = 3", "cri.v1.runtime'.containerd.runtimes.gpuckpt]", "SystemdCgroup = true", `runtime_path = "/opt/gpuckpt/bin/containerd-shim-gpuckpt-v2"`}},
		{name: "k3s", dir: distributions[0], config: "version = 3\n", file: "config-v3.toml.tmpl", words: []string{"{{ template \"base\" . }}\n", "SystemdCgroup = false"}},
		{name: "RKE2 before its first start", dir: distributions[1], file: "config-v3.toml.tmpl", words: []string{"{{ template \"base\" . }}\n"}},
		{name: "RKE2 of containerd 1.7", dir: distributions[1], config: "version = 2\n", file: "config.toml.tmpl", words: []string{"grpc.v1.cri'.containerd.runtimes.gpuckpt]"}},
		{name: "a template of the user's", dir: distributions[0], config: "version = 3\n", template: user, file: "config-v3.toml.tmpl", words: []string{user, "runtimes.gpuckpt]"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			root := t.TempDir()
			if err := os.MkdirAll(filepath.Join(root, c.dir), 0o755); err != nil {
				t.Fatal(err)
			}
			if c.config != "" {
				put(t, filepath.Join(root, c.dir, "config.toml"), c.config, 0o600)
			}
			if c.template != "" {
				put(t, filepath.Join(root, c.dir, c.file), c.template, 0o640)
			}
			before := tree(t, root)
			o := Options{Root: root, Source: release(t, "1"), Prefix: "/opt/gpuckpt"}
			r, err := Install(t.Context(), o)
			if err != nil || r.Config != filepath.Join(c.dir, c.file) || !r.Restart {
				t.Fatalf("%+v, %v", r, err)
			}
			data, err := os.ReadFile(filepath.Join(root, r.Config))
			for _, word := range c.words {
				if !strings.Contains(string(data), word) {
					t.Errorf("no %q in %s, %v", word, data, err)
				}
			}
			if link, err := os.Readlink(filepath.Join(root, criuLink)); err != nil || link != "/opt/gpuckpt/lib/gpuckpt/criu/criu" {
				t.Errorf("CRI finds criu at %q, %v", link, err)
			}
			if r, err := Install(t.Context(), o); err != nil || len(r.Changed) != 0 || r.Restart {
				t.Errorf("a second time: %+v, %v", r, err)
			}
			if _, err := Uninstall(t.Context(), o); err != nil {
				t.Error(err)
			}
			same(t, "removed", tree(t, root), before)
		})
	}
}

// What a user adds to a template that was made stays, at the next installation, of another runtime too, and at
// the removal.
func TestTemplateOfBoth(t *testing.T) {
	root := t.TempDir()
	put(t, filepath.Join(root, distributions[0], "config.toml"), "version = 3\n", 0o600)
	o := Options{Root: root, Source: release(t, "1"), Prefix: "/opt/gpuckpt"}
	r, err := Install(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(root, r.Config)
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	const users = "\n[debug]\n  level = 'debug'\n"
	put(t, file, string(data)+users, 0o644)
	for _, do := range []func(context.Context, Options) (Result, error){Install, Install, Uninstall} {
		if _, err := do(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		o.Prefix = "/opt/other"
		if data, err = os.ReadFile(file); !strings.HasPrefix(string(data), "{{ template \"base\" . }}\n") || !strings.HasSuffix(string(data), users) {
			t.Errorf("it is %q, %v", data, err)
		}
	}
	if strings.Contains(string(data), ShimName) {
		t.Errorf("the runtime is left in %q", data)
	}
}

// A node that has a criu keeps it.
func TestOthersCRIU(t *testing.T) {
	root := t.TempDir()
	put(t, filepath.Join(root, "usr/sbin/criu"), "the distribution's", 0o755)
	put(t, filepath.Join(root, distributions[0], "config.toml"), "version = 3\n", 0o600)
	if _, err := Install(t.Context(), Options{Root: root, Source: release(t, "1"), Prefix: "/opt/gpuckpt"}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(root, criuLink)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is a second one: %v", err)
	}
}

// The link to criu leads to the last release, but for one that could not be installed, until somebody puts
// another criu there.
func TestCRIULink(t *testing.T) {
	root := t.TempDir()
	put(t, filepath.Join(root, distributions[0], "config.toml"), "version = 3\n", 0o600)
	at := filepath.Join(root, criuLink)
	leadsTo := func(prefix string) {
		t.Helper()
		if link, err := os.Readlink(at); err != nil || link != prefix+"/lib/gpuckpt/criu/criu" {
			t.Errorf("it leads to %q, %v", link, err)
		}
	}
	o := Options{Root: root, Source: release(t, "1"), Prefix: "/opt/gpuckpt"}
	for _, step := range []struct{ prefix, leads, restart string }{{"/opt/gpuckpt", "/opt/gpuckpt", ""}, {"/opt/2", "/opt/gpuckpt", "exit 3"}, {"/opt/3", "/opt/3", ""}} {
		o.Prefix, o.Restart, o.RestartCommand = step.prefix, step.restart != "", "sh -c '"+step.restart+"'"
		if _, err := Install(t.Context(), o); (err != nil) != o.Restart {
			t.Fatal(err)
		}
		leadsTo(step.leads)
	}
	if err := os.Remove(at); err != nil {
		t.Fatal(err)
	}
	put(t, at, "another", 0o755)
	o.Restart = false
	for _, do := range []func(context.Context, Options) (Result, error){Install, Install, Uninstall} {
		if _, err := do(t.Context(), o); err != nil {
			t.Fatal(err)
		}
		o.Prefix = "/opt/other"
		if text, err := os.ReadFile(at); err != nil || string(text) != "another" {
			t.Errorf("it is %q, %v", text, err)
		}
	}
}

// A file of the user's at the drop-in's place is left as it is, and the runtime is not installed.
func TestOthersFile(t *testing.T) {
	root := t.TempDir()
	config := "version = 3\nimports = ['" + distributions[0] + "/config-v3.toml.d/*.toml']\n"
	put(t, filepath.Join(root, distributions[0], "config.toml"), config, 0o600)
	path := filepath.Join(root, distributions[0], "config-v3.toml.d/gpuckpt.toml")
	put(t, path, "mine", 0o600)
	_, err := Install(t.Context(), Options{Root: root, Source: release(t, "1"), Prefix: "/opt/gpuckpt"})
	if err == nil || !strings.Contains(err.Error(), "is not of this installer") {
		t.Error(err)
	}
	if data, _ := os.ReadFile(path); string(data) != "mine" {
		t.Errorf("it is %q", data)
	}
}

// An import is added to containerd's configuration in each of its forms, and nothing else changes.
func TestAddImport(t *testing.T) {
	const file, config = "/etc/containerd/conf.d/gpuckpt.toml", "/etc/containerd/config.toml"
	for _, c := range []struct{ had, want string }{
		{"version = 2\n", "version = 2\nimports = [\"" + file + "\"] # by gpuckpt install\n"},
		{"version = 3\n[grpc]\nimports = []\n", "version = 3\nimports = [\"" + file + "\"] # by gpuckpt install\n[grpc]\nimports = []\n"},
		{"imports = []\nversion = 3\n", "imports = [\"" + file + "\"]\nversion = 3\n"},
		{"imports = [\n  'a.toml', # mine\n]\n", "imports = [\"" + file + "\", \n  'a.toml', # mine\n]\n"},
	} {
		root := t.TempDir()
		put(t, filepath.Join(root, config), c.had, 0o640)
		o := Options{Root: root, Record: recordFile}
		changes := newChanges(o, new(record), new(Result))
		if err := o.addImport(changes, config, file); err != nil {
			t.Fatal(err)
		}
		if data, _ := os.ReadFile(filepath.Join(root, config)); string(data) != c.want {
			t.Errorf("%q became %q, want %q", c.had, data, c.want)
		}
		if err := changes.undo(); err != nil {
			t.Fatal(err)
		}
		if data, _ := os.ReadFile(filepath.Join(root, config)); string(data) != c.had {
			t.Errorf("%q came back as %q", c.had, data)
		}
	}
}
