// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package recovery

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// dead is a process that is gone: no process has started at the end of time.
var dead = proc.Process{PID: 1, Start: 1<<64 - 1}

// record writes a record that another shim has left, and returns its path and the node's configuration.
func record(t *testing.T, change func(*journal.Record)) (string, config.Node) {
	t.Helper()
	node := config.Default()
	node.StateDir = t.TempDir()
	boot, err := journal.Boot()
	if err != nil {
		t.Fatal(err)
	}
	pids, err := journal.PIDNamespace()
	if err != nil {
		t.Fatal(err)
	}
	r := journal.Record{PIDNamespace: pids, Schema: journal.Schema, Namespace: "ns", Container: "c", Boot: boot, Shim: dead, Operation: "checkpoint", Step: "dump"}
	change(&r)
	path := journal.Path(node.StateDir, r.Namespace, r.Container)
	data, err := json.Marshal(r)
	if err == nil {
		err = errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, data, 0o600))
	}
	if err != nil {
		t.Fatal(err)
	}
	return path, node
}

func fill(t *testing.T, dir string, names ...string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

func names(t *testing.T, dir string) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// What a checkpoint has written goes, and nothing else; a complete one stays.
func TestImages(t *testing.T) {
	area := images.AreaFile(1, 0)
	for _, test := range []struct {
		name       string
		made       bool
		had, found []string
		left       []string
	}{
		{"made", true, nil, []string{area, "inventory.img", "descriptors.json", ".tmp-gpuckpt.json", "gpuckpt.manifest"}, nil},
		{"made, with what is told beside CRIU's images", true, nil, []string{"core-1.img", image.ThreadsName, image.SocketsName, image.RootName, image.WatchesName, image.DifferentName, image.FilesName, sequence.TimelineName}, nil},
		{"made, and somebody's file", true, nil, []string{area, "notes.txt"}, []string{"notes.txt"}},
		{"not made yet", true, nil, nil, nil},
		{"was empty", false, nil, []string{area, "core-1.img"}, nil},
		{"had files", false, []string{"core-1.img", "notes.txt"}, []string{area, "core-1.img", "core-2.img", "notes.txt"}, []string{"core-1.img", "core-2.img", "notes.txt"}},
		{"complete", true, nil, []string{area, images.MetadataName, "inventory.img"}, []string{area, images.MetadataName, "inventory.img"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "images")
			if test.found != nil || !test.made {
				fill(t, dir, test.found...)
			}
			path, node := record(t, func(r *journal.Record) { r.Images = &imagedir.Dir{Path: dir, Made: test.made, Had: test.had} })
			report, err := Recover(t.Context(), node, path, false)
			if err != nil || len(report.ToDo) > 0 {
				t.Fatalf("%+v, %v", report, err)
			}
			left := names(t, dir)
			slices.Sort(test.left)
			if !slices.Equal(left, test.left) {
				t.Errorf("left are %q, want %q", left, test.left)
			}
			if _, err := os.Stat(dir); test.made && len(test.left) == 0 && !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the directory is still there: %v", err)
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("the record is still there: %v", err)
			}
		})
	}
}

// A directory that another shim, which lives, writes to is not touched.
func TestImagesOfAnother(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "images")
	fill(t, dir, images.AreaFile(1, 0))
	path, node := record(t, func(r *journal.Record) { r.Images = &imagedir.Dir{Path: dir, Made: true} })
	var live journal.Journal
	if err := live.Write(node.StateDir, journal.Record{Namespace: "other", Container: "d", Operation: "checkpoint", Images: &imagedir.Dir{Path: dir}}); err != nil {
		t.Fatal(err)
	}
	if _, err := Recover(t.Context(), node, path, false); err != nil {
		t.Fatal(err)
	}
	if left := names(t, dir); len(left) != 1 {
		t.Errorf("left are %q", left)
	}
}

// From a container of its own nobody can see whether the shim lives: nothing is touched.
func TestAnotherPIDNamespace(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "images")
	fill(t, dir, images.AreaFile(1, 0))
	path, node := record(t, func(r *journal.Record) {
		r.PIDNamespace, r.Images = "pid:[1]", &imagedir.Dir{Path: dir, Made: true}
	})
	if _, err := Recover(t.Context(), node, path, true); err == nil || !strings.Contains(err.Error(), "cannot be seen from") {
		t.Errorf("error %v", err)
	}
	Sweep(t.Context(), node, "ns")
	if len(names(t, dir)) != 1 {
		t.Error("the images are gone")
	}
}

// Of what a restore and a suspension leave only what is theirs by name goes.
func TestDirectories(t *testing.T) {
	base := t.TempDir()
	spill, unpacked, foreign := filepath.Join(base, "gpuckpt-spill-ns-c"), filepath.Join(base, "ctrd-checkpoint123"), filepath.Join(base, "home")
	for _, dir := range []string{spill, unpacked, foreign} {
		fill(t, dir, "file")
	}
	path, node := record(t, func(r *journal.Record) { r.Boot, r.Spill, r.Unpacked = "another boot", spill, unpacked })
	report, err := Recover(t.Context(), node, path, false)
	if err != nil || len(report.Done) != 2 {
		t.Fatalf("%+v, %v", report, err)
	}
	path, node = record(t, func(r *journal.Record) { r.Spill, r.Unpacked = foreign, foreign })
	if _, err := Recover(t.Context(), node, path, false); err == nil || !strings.Contains(err.Error(), "no directory of spilled GPU state") {
		t.Errorf("error %v", err)
	}
	if left := names(t, base); !slices.Equal(left, []string{"home"}) {
		t.Errorf("left are %q", left)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("the record went though something is left: %v", err)
	}
}

// Where the shim lives, a person is told what it waits for, and nothing is changed.
func TestShimLives(t *testing.T) {
	for state, says := range map[string]string{
		"": "is under way since", journal.Paused: "ctr -n ns tasks resume c", journal.Suspended: "gpuckpt resume -n ns c",
		journal.Stuck: "could not undo the checkpoint (why)",
	} {
		dir := filepath.Join(t.TempDir(), "images")
		fill(t, dir, images.AreaFile(1, 0))
		self, err := proc.Identify(os.Getpid())
		if err != nil {
			t.Fatal(err)
		}
		path, node := record(t, func(r *journal.Record) {
			r.Shim, r.State, r.Why, r.Images = self, state, "why", &imagedir.Dir{Path: dir, Made: true}
		})
		report, err := Recover(t.Context(), node, path, false)
		if err != nil || len(report.ToDo) != 1 || !strings.Contains(report.ToDo[0], says) {
			t.Errorf("%q: %+v, %v", state, report, err)
		}
		Sweep(t.Context(), node, "ns")
		if len(names(t, dir)) != 1 {
			t.Errorf("%q: the images of a checkpoint under way are gone", state)
		}
	}
}

// A sweep takes what is left of the dead, and leaves containers that live.
func TestSweep(t *testing.T) {
	self, err := proc.Identify(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	for init, stays := range map[proc.Process]bool{dead: false, self: true} {
		path, node := record(t, func(r *journal.Record) { r.Init, r.State = init, journal.Suspended })
		Sweep(t.Context(), node, "another")
		if _, err := os.Stat(path); err != nil {
			t.Errorf("a record of another namespace is gone: %v", err)
		}
		Sweep(t.Context(), node, "ns")
		if _, err := os.Stat(path); (err == nil) != stays {
			t.Errorf("with %v: %v, want it to stay: %v", init, err, stays)
		}
	}
}

// A record that was not on the disk when the power was lost is in nobody's way.
func TestEmptyRecord(t *testing.T) {
	for name, recover := range map[string]func(config.Node, string) error{
		"sweep": func(node config.Node, _ string) error { Sweep(t.Context(), node, "ns"); return nil },
		"recover": func(node config.Node, path string) error {
			_, err := Recover(t.Context(), node, path, false)
			return err
		},
	} {
		path, node := record(t, func(*journal.Record) {})
		if err := errors.Join(os.Truncate(path, 0), recover(node, path)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: it is there: %v", name, err)
		}
	}
}

// A pod's network that the CRIU of a checkpoint has locked is unlocked, also when the container has ended.
func TestNetworkOfDeadShim(t *testing.T) {
	iptables, err := exec.LookPath("iptables")
	if err != nil || os.Geteuid() != 0 {
		t.Skipf("needs root and iptables: %v", err)
	}
	pod := exec.Command("sleep", "600")
	pod.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if err := pod.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pod.Process.Kill(); _ = pod.Wait() })
	network := fmt.Sprintf("/proc/%d/ns/net", pod.Process.Pid)
	run := func(args ...string) (out []byte, err error) {
		err = host.InNetwork(network, func() (err error) {
			out, err = exec.Command(iptables, append([]string{"-w"}, args...)...).CombinedOutput()
			return err
		})
		return out, err
	}
	for _, rule := range []string{"-N CRIU", "-A CRIU -j DROP", "-I INPUT -j CRIU", "-I OUTPUT -j CRIU"} {
		if out, err := run(strings.Fields(rule)...); err != nil {
			t.Fatalf("%s: %v: %s", rule, err, out)
		}
	}
	bundle := t.TempDir()
	spec := `{"linux":{"namespaces":[{"type":"network","path":"` + network + `"}]}}`
	for name, text := range map[string]string{"config.json": spec, criu.SettingsName: "tcp-established\n"} {
		if err := os.WriteFile(filepath.Join(bundle, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	path, node := record(t, func(r *journal.Record) { r.Bundle, r.Init = bundle, dead })
	report, err := Recover(t.Context(), node, path, false)
	if err != nil || !slices.Contains(report.Done, "unlocked its network") {
		t.Errorf("%+v, %v", report, err)
	}
	if out, err := run("-S"); err != nil || strings.Contains(string(out), "CRIU") {
		t.Errorf("left is %s, %v", out, err)
	}
}
