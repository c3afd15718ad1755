// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
)

// wantError checks an error by a part of its text; "" wants none.
func wantError(t *testing.T, err error, text string) {
	t.Helper()
	if text == "" {
		if err != nil {
			t.Errorf("got the error %v, want none", err)
		}
	} else if err == nil || !strings.Contains(err.Error(), text) {
		t.Errorf("got the error %v, want one with %q", err, text)
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

func TestCheck(t *testing.T) {
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
			err := Check(t.Context(), Shim{}, filepath.Join(usePrograms(t, map[string]string{"criu": test.script}), "criu"))
			wantError(t, err, test.err)
			if err != nil && errdefs.IsFailedPrecondition(err) != test.code {
				t.Errorf("the error's kind: %v", err)
			}
		})
	}
	usePrograms(t, nil)
	for _, configured := range []string{"", "/none/criu"} {
		if err := Check(t.Context(), Shim{}, configured); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "install CRIU") {
			t.Errorf("no %q: got %v", configured, err)
		}
	}
}

// A criu that is good is asked once, until it is another. One that is not is asked each time.
func TestCheckOnce(t *testing.T) {
	dir := usePrograms(t, map[string]string{"criu": `echo asked >>"${0%/*}/asked"; echo Version: 4.2`})
	cache := filepath.Join(t.TempDir(), "run", "criu")
	check := func(asked int, text string) {
		t.Helper()
		wantError(t, checkOnce(t.Context(), Shim{}, "", cache), text)
		if found, err := os.ReadFile(filepath.Join(dir, "asked")); err != nil || strings.Count(string(found), "asked") != asked {
			t.Errorf("asked %d times, %v; want %d", strings.Count(string(found), "asked"), err, asked)
		}
	}
	criu := filepath.Join(dir, "criu")
	replace := func(version string) {
		t.Helper()
		script := "#!/bin/sh\n" + `echo asked >>"${0%/*}/asked"; echo Version: ` + version + "\n"
		if err := os.WriteFile(criu+".new", []byte(script), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(criu+".new", criu); err != nil {
			t.Fatal(err)
		}
	}
	check(1, "")
	check(1, "")
	replace("3.9")
	check(2, "too old")
	check(3, "too old")
	replace("4.3")
	check(4, "")
	check(4, "")
	if err := os.Remove(criu); err != nil {
		t.Fatal(err)
	}
	check(4, "no criu")
}

// The directory given is the first in runc's $PATH, then the configured criu's, and in nobody else's.
func TestWithPath(t *testing.T) {
	monitor := runc.Monitor
	defer func() { runc.Monitor = monitor }()
	dir := usePrograms(t, map[string]string{"runc": `echo "$PATH" >"$GPUCKPT_TEST_OUT"`, "x": ""})
	out := filepath.Join(t.TempDir(), "out")
	t.Setenv("GPUCKPT_TEST_OUT", out)
	for _, test := range []struct{ configured, first, want string }{
		{want: dir},
		{configured: "/opt/criu/criu", want: "/opt/criu:" + dir},
		{first: "/first", want: "/first:" + dir},
		{configured: "/opt/criu/criu", first: "/first", want: "/first:/opt/criu:" + dir},
	} {
		if err := new(runc.Runc).Delete(WithPath(t.Context(), test.configured, test.first), "id", nil); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(out)
		if err != nil || strings.TrimSpace(string(got)) != test.want || os.Getenv("PATH") != dir {
			t.Errorf("%+v: runc's is %s, %v; and the shim's %s", test, got, err, os.Getenv("PATH"))
		}
	}
}

func TestVersion(t *testing.T) {
	for _, test := range []struct{ out, want, err string }{
		{out: "Version: 4.2.1\n", want: "4.2.1"},
		{out: "Version: 4.2.1\nGitID: v4.2.1\n", want: "4.2.1"},
		{out: "Warn: something\nVersion:3.17", want: "3.17"},
		{out: "", err: "no version"},
		{out: "criu 4.2\n", err: "no version"},
	} {
		path := filepath.Join(usePrograms(t, map[string]string{"criu": "printf '%s' '" + test.out + "'"}), "criu")
		got, err := Version(t.Context(), Shim{}, path)
		wantError(t, err, test.err)
		if got != test.want {
			t.Errorf("%q: got %q, want %q", test.out, got, test.want)
		}
	}
}

func TestTooOld(t *testing.T) {
	for version, want := range map[string]bool{
		"4.2": false, "4.2.1": false, "4.3": false, "5": false, "5.0": false, "4.10": false,
		"4.1.9": true, "4": true, "3.17.1": true,
		"4.2-rc1": false, "git-abc": false, "": false, // not made of numbers
	} {
		if got := TooOld(version); got != want {
			t.Errorf("%q: %v", version, got)
		}
	}
}
