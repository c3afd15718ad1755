// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/internal/config"
)

func TestWriteCRIUSettings(t *testing.T) {
	for _, test := range []struct {
		name        string
		base        string // of the file that the container would have without the shim
		noBase      bool
		options     map[string]any
		annotations map[string]string
		want        string // all lines but an automatic network-lock
		err         string
	}{
		{name: "nothing", want: "tcp-established\n"},
		{name: "no file", noBase: true, want: "tcp-established\n"},
		{name: "only the base", base: "tcp-established\nghost-limit 5", want: "tcp-established\nghost-limit 5\n"},
		{
			name: "later lines win", base: "ghost-limit 5\n",
			options: map[string]any{"ghost-limit": int64(6), "file-locks": true}, annotations: map[string]string{"dev.gpuckpt.criu.ghost-limit": "7"},
			want: "ghost-limit 5\nfile-locks\nghost-limit 7\ntcp-established\n",
		},
		{
			name: "annotations", annotations: map[string]string{
				"dev.gpuckpt.criu.tcp-established": "true", "dev.gpuckpt.criu.file-locks": "", "dev.gpuckpt.criu.skip-in-flight": "false",
				"dev.gpuckpt.criu.network-lock": "nftables", "dev.gpuckpt.on-checkpoint": "stop", "org.criu.config": "/elsewhere", "other": "x",
			},
			want: "file-locks\nnetwork-lock nftables\ntcp-established\n",
		},
		{
			name: "off for one container", options: map[string]any{"tcp-established": true},
			annotations: map[string]string{"dev.gpuckpt.criu.tcp-established": "false"}, want: "",
		},
		{name: "network-lock of the base", base: "network-lock  skip\n", want: "network-lock  skip\ntcp-established\n"},
		{name: "network-lock of the node", options: map[string]any{"network-lock": "skip"}, want: "network-lock skip\ntcp-established\n"},
		{name: "scripts are the node's", annotations: map[string]string{"dev.gpuckpt.criu.action-script": "/evil"}, err: "may set only"},
		{name: "libdir is the node's", annotations: map[string]string{"dev.gpuckpt.criu.libdir": "/evil"}, err: "may set only"},
		{name: "no such annotation", annotations: map[string]string{"dev.gpuckpt.criu.": "x"}, err: "may set only"},
		{name: "a second line", annotations: map[string]string{"dev.gpuckpt.criu.timeout": "1\naction-script /evil"}, err: "control characters"},
	} {
		t.Run(test.name, func(t *testing.T) {
			// So that no plugin of this machine is found.
			t.Setenv("CRIU_LIBS_DIR", "")
			bundle := t.TempDir()
			c := &container{bundle: bundle}
			if !test.noBase {
				c.criuBase = filepath.Join(t.TempDir(), "runc.conf")
				writeFile(t, c.criuBase, test.base)
			}
			view := config.View{Node: config.Default(), Annotations: test.annotations}
			view.CRIU.Options = test.options
			view.CRIU.PluginDir = t.TempDir()
			err := c.writeCRIUSettings(t.Context(), view)
			wantError(t, err, test.err)
			if err != nil {
				if !errdefs.IsInvalidArgument(err) {
					t.Errorf("the error is no invalid argument: %v", err)
				}
				return
			}
			got := readSettings(t, bundle)
			libdir := "libdir " + filepath.Join(bundle, "criu-plugins") + "\n"
			if !strings.HasSuffix(got, libdir) {
				t.Errorf("CRIU's plugins are not kept apart:\n%s", got)
			}
			got = strings.TrimSuffix(got, libdir)
			lock := "network-lock " + networkLock(t.Context()) + "\n"
			if lock != "network-lock iptables\n" && !hasOption(test.want, "network-lock") {
				test.want += lock
			}
			if got != test.want {
				t.Errorf("got\n%swant\n%s", got, test.want)
			}
		})
	}
}

func readSettings(t *testing.T, bundle string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(bundle, criuSettingsName))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// All plugins but the CUDA plugin are in the directory that CRIU is given.
func TestPluginsWithoutCUDA(t *testing.T) {
	from := t.TempDir()
	for _, name := range []string{"cuda_plugin.so", "amdgpu_plugin.so", "README"} {
		writeFile(t, filepath.Join(from, name), "")
	}
	want := func(dir string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		entries, err := os.ReadDir(dir)
		if err != nil || len(entries) != 1 || entries[0].Name() != "amdgpu_plugin.so" {
			t.Errorf("%s holds %v, error %v; want amdgpu_plugin.so", dir, entries, err)
		}
	}
	dir := filepath.Join(t.TempDir(), "plugins")
	want(pluginsWithoutCUDA(from, dir))
	want(pluginsWithoutCUDA(from, dir)) // a second checkpoint
	t.Setenv("CRIU_LIBS_DIR", from)
	want(pluginsWithoutCUDA("", filepath.Join(t.TempDir(), "plugins")))
}

// The way to keep packets away depends on what $PATH has.
func TestChooseNetworkLock(t *testing.T) {
	for _, test := range []struct {
		name     string
		programs map[string]string
		want     string
	}{
		{"neither", nil, "skip"},
		{"iptables", map[string]string{"iptables-restore": "exit 0", "criu": "exit 0"}, "iptables"},
		{"nftables", map[string]string{"criu": `[ "$*" = "check --feature network_lock_nftables" ]`}, "nftables"},
		{"a CRIU or kernel without", map[string]string{"criu": "exit 1"}, "skip"},
	} {
		t.Run(test.name, func(t *testing.T) {
			usePrograms(t, test.programs)
			if got := chooseNetworkLock(t.Context()); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// usePrograms makes $PATH have these shell scripts and nothing else.
func usePrograms(t *testing.T, programs map[string]string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, script := range programs {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	return dir
}

func TestCheckCRIU(t *testing.T) {
	for _, test := range []struct {
		name, script, err string
		code              bool // FailedPrecondition
	}{
		{name: "new enough", script: "echo Version: 4.2; echo GitID: v4.2"},
		{name: "newer", script: "echo Version: 10.0.1"},
		{name: "too old", script: "echo Version: 3.17.1", err: "is version 3.17.1, too old", code: true},
		{name: "fails", script: "exit 3", err: "exit status 3"},
		{name: "says nothing", script: "true", err: "no version"},
	} {
		t.Run(test.name, func(t *testing.T) {
			node := config.Default()
			node.CRIU.Path = filepath.Join(usePrograms(t, map[string]string{"criu": test.script}), "criu")
			err := checkCRIU(t.Context(), node)
			wantError(t, err, test.err)
			if err != nil && errdefs.IsFailedPrecondition(err) != test.code {
				t.Errorf("the error's kind: %v", err)
			}
		})
	}
	// A path that was taken out of the configuration is out of $PATH too.
	useCRIU(config.Default())
	if strings.Contains(os.Getenv("PATH"), "TestCheckCRIU") {
		t.Errorf("$PATH is still %s", os.Getenv("PATH"))
	}
}

func TestParseCRIUVersion(t *testing.T) {
	for _, test := range []struct{ out, want, err string }{
		{out: "Version: 4.2.1\n", want: "4.2.1"},
		{out: "Version: 4.2.1\nGitID: v4.2.1\n", want: "4.2.1"},
		{out: "Warn: something\nVersion:3.17", want: "3.17"},
		{out: "", err: "no version"},
		{out: "criu 4.2\n", err: "no version"},
	} {
		got, err := parseCRIUVersion(test.out)
		wantError(t, err, test.err)
		if got != test.want {
			t.Errorf("%q: got %q, want %q", test.out, got, test.want)
		}
	}
}

func TestOlder(t *testing.T) {
	for _, test := range []struct {
		version, than string
		want          bool
	}{
		{"4.2", "4.2", false},
		{"4.2.1", "4.2", false},
		{"4.3", "4.2", false},
		{"5", "4.2", false},
		{"5.0", "4.2", false},
		{"4.10", "4.2", false},
		{"4.1.9", "4.2", true},
		{"4", "4.2", true},
		{"4", "4.0", false},
		{"3.17.1", "4.2", true},
		{"4.2-rc1", "4.2", false}, // what is not a number ends the comparison
		{"git-abc", "4.2", false},
		{"", "4.2", false},
	} {
		if got := older(test.version, test.than); got != test.want {
			t.Errorf("older(%q, %q) is %v", test.version, test.than, got)
		}
	}
}
