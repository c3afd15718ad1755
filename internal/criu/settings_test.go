// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

func TestWriteSettings(t *testing.T) {
	for _, test := range []struct {
		name        string
		base        string // of the file that the container would have without the shim
		noBase      bool
		options     map[string]any
		annotations map[string]string
		want        string // all lines but an automatic network-lock
		err         string
	}{
		{name: "nothing", want: "link-remap\nskip-in-flight\ntcp-established\n"},
		{name: "no file", noBase: true, want: "link-remap\nskip-in-flight\ntcp-established\n"},
		{name: "only the base", base: "tcp-established\nghost-limit 5", want: "tcp-established\nghost-limit 5\nlink-remap\nskip-in-flight\n"},
		{
			name: "later lines win", base: "ghost-limit 5\n",
			options: map[string]any{"ghost-limit": int64(6), "shell-job": true}, annotations: map[string]string{"dev.gpuckpt.criu.ghost-limit": "7"},
			want: "ghost-limit 5\nghost-limit 7\nlink-remap\nshell-job\nskip-in-flight\ntcp-established\n",
		},
		{
			name: "annotations", annotations: map[string]string{
				"dev.gpuckpt.criu.tcp-established": "", "dev.gpuckpt.criu.tcp-close": "false",
				"dev.gpuckpt.criu.ghost-limit": "5", "dev.gpuckpt.on-checkpoint": "stop", "org.criu.config": "/elsewhere", "other": "x",
			},
			want: "ghost-limit 5\nlink-remap\nskip-in-flight\ntcp-established\n",
		},
		{
			name: "off for one container", options: map[string]any{"tcp-established": true, "link-remap": false},
			annotations: map[string]string{"dev.gpuckpt.criu.tcp-established": "false"}, want: "skip-in-flight\n",
		},
		{name: "network-lock of the base", base: "network-lock  skip\n", want: "network-lock  skip\nlink-remap\nskip-in-flight\ntcp-established\n"},
		{name: "network-lock of the node", options: map[string]any{"network-lock": "skip"}, want: "link-remap\nnetwork-lock skip\nskip-in-flight\ntcp-established\n"},
		{name: "scripts are the node's", annotations: map[string]string{"dev.gpuckpt.criu.action-script": "/evil"}, err: "may set only"},
		{name: "libdir is the node's", annotations: map[string]string{"dev.gpuckpt.criu.libdir": "/evil"}, err: "may set only"},
		{name: "no such annotation", annotations: map[string]string{"dev.gpuckpt.criu.": "x"}, err: "may set only"},
		{name: "a second line", annotations: map[string]string{"dev.gpuckpt.criu.ghost-limit": "1\naction-script /evil"}, err: "control characters"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Setenv("CRIU_LIBS_DIR", t.TempDir()) // no plugin of this machine is found
			bundle := t.TempDir()
			own := maps.Clone(test.annotations)
			if own == nil {
				own = make(map[string]string)
			}
			settings := Settings{Bundle: bundle, View: config.View{Annotations: own}}
			settings.View.CRIU = config.CRIU{Options: test.options}
			own[annotations.CRIUConfig] = ""
			if !test.noBase {
				own[annotations.CRIUConfig] = filepath.Join(t.TempDir(), "runc.conf")
				writeFile(t, own[annotations.CRIUConfig], test.base)
			}
			err := settings.Write(t.Context(), Shim{})
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
			criu, _ := Find(Shim{}, "")
			lock := "network-lock " + cachedNetworkLock(t.Context(), Shim{}, criu, networkLockCache) + "\n"
			if lock != "network-lock iptables\n" && !hasOption(test.want, "network-lock") {
				test.want += lock
			}
			if got != test.want {
				t.Errorf("got\n%swant\n%s", got, test.want)
			}
			if locks, err := settings.LocksNetwork(t.Context(), Shim{}); err != nil || locks == (optionValue(got, "network-lock") == LockSkip) {
				t.Errorf("CRIU locks the network: %v, error %v, by\n%s", locks, err, got)
			}
		})
	}
}

// readSettings returns the settings but the one that all have.
func readSettings(t *testing.T, bundle string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(bundle, SettingsName))
	if err != nil {
		t.Fatal(err)
	}
	// Locks are dumped whatever anybody says.
	if !hasOption(string(data), "file-locks") {
		t.Errorf("no file-locks in\n%s", data)
	}
	return strings.Replace(string(data), "file-locks\n", "", 1)
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
	settings := Settings{Bundle: t.TempDir(), View: config.View{}}
	t.Setenv("CRIU_LIBS_DIR", from)
	want(settings.libdir(""))
	want(settings.libdir("")) // a second checkpoint
}

// The way to keep packets away depends on what $PATH has.
func TestNetworkLock(t *testing.T) {
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
			criu := filepath.Join(usePrograms(t, test.programs), "criu")
			if got, _ := NetworkLock(t.Context(), Shim{}, criu); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

// CRIU is asked once, and once more after a client that did not wait for the answer.
func TestNetworkLockOnce(t *testing.T) {
	dir := usePrograms(t, map[string]string{"criu": `echo asked >>"${0%/*}/asked"`})
	criu, cache := filepath.Join(dir, "criu"), filepath.Join(t.TempDir(), "run", "lock")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	cachedNetworkLock(gone, Shim{}, criu, cache)
	for range 2 {
		if got := cachedNetworkLock(t.Context(), Shim{}, criu, cache); got != LockNftables {
			t.Errorf("got %q", got)
		}
	}
	if asked, err := os.ReadFile(filepath.Join(dir, "asked")); string(asked) != "asked\n" {
		t.Errorf("%q, %v", asked, err)
	}
}

// Established connections are dumped, and restored as package adapt has edited them, unless somebody
// decides for all of them.
func TestTCPDefault(t *testing.T) {
	for name, test := range map[string]struct {
		options map[string]any
		base    string
		want    string
		decided bool
	}{
		"nobody":                      {nil, "", "tcp-established\n", false},
		"open on request":             {map[string]any{"tcp-established": true}, "", "tcp-established\n", true},
		"closed on request":           {map[string]any{"tcp-close": true}, "", "tcp-close\n", true},
		"refused on request":          {map[string]any{"tcp-established": false}, "", "", true},
		"as CRIU's configuration has": {nil, "tcp-close\n", "tcp-close\n", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("CRIU_LIBS_DIR", t.TempDir()) // no plugin of this machine is found
			base := filepath.Join(t.TempDir(), "runc.conf")
			settings := Settings{Bundle: t.TempDir()}
			settings.View.Annotations = map[string]string{annotations.CRIUConfig: base}
			settings.View.CRIU = config.CRIU{Options: test.options}
			writeFile(t, base, test.base+"network-lock skip\n")
			if err := settings.Write(t.Context(), Shim{}); err != nil {
				t.Fatal(err)
			}
			got := strings.NewReplacer("network-lock skip\n", "", "link-remap\n", "", "skip-in-flight\n", "", "libdir "+filepath.Join(settings.Bundle, "criu-plugins")+"\n", "").Replace(readSettings(t, settings.Bundle))
			if got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
			if decided, err := settings.ConnectionsDecided(); err != nil || decided != test.decided {
				t.Errorf("decided: %v, %v", decided, err)
			}
		})
	}
}

// The settings begin with the file that CRIU would have read without them.
func TestBase(t *testing.T) {
	for _, test := range []struct {
		own  map[string]string
		base string
	}{
		{nil, runcSettings},
		{map[string]string{"a": "b"}, runcSettings},
		{map[string]string{"org.criu.config": "/mine"}, "/mine"},
		{map[string]string{"org.criu.config": ""}, ""},
	} {
		if got := (Settings{View: config.View{Annotations: test.own}}).base(); got != test.base {
			t.Errorf("%v: got %q, want %q", test.own, got, test.base)
		}
	}
}

func TestKeepsConnections(t *testing.T) {
	for _, test := range []struct {
		base        string
		annotations map[string]string
		want        bool
	}{
		{"", nil, false},
		{"", map[string]string{"dev.gpuckpt.criu.tcp-established": "true"}, true},
		{"", map[string]string{"dev.gpuckpt.criu.tcp-close": "true"}, false},
		{"tcp-established\n", nil, true},
		{"tcp-established\n", map[string]string{"dev.gpuckpt.criu.tcp-established": "false"}, false},
	} {
		file := filepath.Join(t.TempDir(), "runc.conf")
		if err := os.WriteFile(file, []byte(test.base), 0o600); err != nil {
			t.Fatal(err)
		}
		view := config.View{Annotations: map[string]string{"org.criu.config": file}}
		maps.Copy(view.Annotations, test.annotations)
		if got, err := (Settings{View: view}).KeepsConnections(); err != nil || got != test.want {
			t.Errorf("%+v: %v, %v", test, got, err)
		}
	}
}
