// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"
)

// useConfig makes a text the node's configuration during a test.
func useConfig(t *testing.T, text string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.toml")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(Env, path)
}

// wantError checks an error by a part of its text; "" wants none.
func wantError(t *testing.T, err error, text string) {
	t.Helper()
	switch {
	case text == "" && err != nil:
		t.Errorf("error %v, want none", err)
	case text != "" && (err == nil || !strings.Contains(err.Error(), text)):
		t.Errorf("error %v, want one that says %q", err, text)
	}
}

func TestParse(t *testing.T) {
	with := func(change func(*Node)) Node {
		c := Default()
		change(&c)
		return c
	}
	for _, test := range []struct {
		name, text string
		want       Node
		err        string
	}{
		{name: "nothing", want: Default()},
		{name: "a comment", text: "# all defaults\n", want: Default()},
		{name: "everything", text: `
driver_root = "/opt/driver"
lock_timeout = "1m30s"
stall_timeout = "5s"
shells = "end"
hook_timeout = "30s"
fork_limit = 1073741824
log_dir = "/logs"
[staging]
steer = false
cgroup = "a/b"
memory_limit = 67108864
when_short = "write-through"
[criu]
path = "/opt/criu/criu"
[debug]
copy_threads = 0
host_memory = 1048576
[criu.options]
tcp-established = true
ghost-limit = 1048576
network-lock = "skip"
external = ["mnt[a]:b", "dev[c]:d"]
`, want: with(func(c *Node) {
			c.DriverRoot, c.LogDir, c.Shells = "/opt/driver", "/logs", End
			c.HookTimeout, c.ForkLimit = Duration(30*time.Second), 1<<30
			c.LockTimeout, c.StallTimeout = Duration(90*time.Second), Duration(5*time.Second)
			c.Staging = Staging{Cgroup: "a/b", MemoryLimit: 64 << 20, WhenShort: WriteThrough}
			c.Debug = Debug{HostMemory: 1 << 20}
			c.CRIU = CRIU{Path: "/opt/criu/criu", Options: map[string]any{
				"tcp-established": true, "ghost-limit": int64(1048576), "network-lock": "skip",
				"external": []any{"mnt[a]:b", "dev[c]:d"},
			}}
		})},
		{name: "one setting", text: `lock_timeout = "1s"`, want: with(func(c *Node) { c.LockTimeout = Duration(time.Second) })},
		{name: "unknown setting", text: "\nlock_timout = \"1s\"", err: "unknown setting lock_timout (line 2)"},
		{name: "unknown settings", text: "a = 1\n[criu]\nb = 2\n", err: "unknown setting a (line 1), criu.b (line 3)"},
		{name: "unknown section", text: "[crui]\n", err: "unknown setting crui"},
		{name: "not TOML", text: "\nlock_timeout: 1s", err: "line 2: toml"},
		{name: "text for a number", text: "[staging]\nmemory_limit = \"1GiB\"", err: "line 2: "},
		{name: "the same twice", text: "log_dir = \"a\"\nlog_dir = \"b\"", err: "log_dir"},
		{name: "a number for a duration", text: "lock_timeout = 10", err: "lock_timeout is 10ns"},
		{name: "no duration", text: `lock_timeout = "soon"`, err: `line 1: toml: time: invalid duration "soon"`},
		{name: "no time at all", text: `lock_timeout = "0s"`, err: "1ms or more"},
		{name: "negative", text: `lock_timeout = "-1s"`, err: "1ms or more"},
		{name: "no time for a hook", text: `hook_timeout = "0s"`, err: "hook_timeout is 0s; it must be 1ms or more"},
		{name: "gigabytes for bytes", text: "[staging]\nmemory_limit = 64", err: "memory_limit is 64 bytes; it must be 0 or at least 16777216"},
		{name: "less than nothing by forks", text: "fork_limit = -1", err: "fork_limit is -1; it must not be negative"},
		{name: "no such end of a shell", text: `shells = "kill"`, err: `shells is "kill"; it must be "refuse" or "end"`},
		{name: "empty choice", text: `shells = ""`, err: `shells is ""`},
		{name: "no time for the driver", text: `stall_timeout = "1ms"`, err: "it must be 1s or more"},
		{name: "no such way", text: "[staging]\nwhen_short = \"spill\"", err: `when_short is "spill"; it must be "refuse", "write-through" or "driver"`},
		{name: "too many threads", text: "[debug]\ncopy_threads = 33", err: "[debug] copy_threads is 33; it must be from 0 to 32"},
		{name: "fewer threads than none", text: "[debug]\ncopy_threads = -1", err: "copy_threads is -1"},
		{name: "less memory than none", text: "[debug]\nhost_memory = -1", err: "host_memory is -1"},
		{name: "criu of another name", text: "[criu]\npath = \"/usr/sbin/criu-4.2\"", err: "ends in /criu"},
		{name: "relative log_dir", text: "log_dir = \"logs\"", err: "absolute path"},
		{name: "no log_dir", text: "log_dir = \"\"", err: "absolute path"},
		{name: "relative criu", text: "[criu]\npath = \"bin/criu\"", err: "absolute path"},
		{name: "option in capitals", text: "[criu.options]\nTCP = true", err: `[criu.options]: "TCP" is not a name`},
		{name: "option with a line feed", text: "[criu.options]\nlibdir = \"a\\nb\"", err: "[criu.options]: libdir"},
		{name: "option of no known type", text: "[criu.options]\nlibdir = 1.5", err: "[criu.options]: libdir"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := parse([]byte(test.text))
			wantError(t, err, test.err)
			if err != nil && strings.Contains(err.Error(), "\n") {
				t.Errorf("the error has several lines: %v", err)
			}
			if test.err == "" && !reflect.DeepEqual(got, test.want) {
				t.Errorf("got %+v, want %+v", got, test.want)
			}
		})
	}
}

func TestLoad(t *testing.T) {
	t.Run("named and there", func(t *testing.T) {
		useConfig(t, `log_dir = "/logs"`)
		config, err := Load()
		if err != nil || config.LogDir != "/logs" {
			t.Errorf("got %+v, error %v", config, err)
		}
	})
	t.Run("named and missing", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "none.toml")
		t.Setenv(Env, path)
		_, err := Load()
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("error %v, want ErrInvalid", err)
		}
		wantError(t, err, path)
	})
	t.Run("broken", func(t *testing.T) {
		useConfig(t, `nonsense`)
		_, err := Load()
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("error %v, want ErrInvalid", err)
		}
		wantError(t, err, os.Getenv(Env))
	})
}

// Operations beside each other have some of a limit each.
func TestBuffer(t *testing.T) {
	for limit, want := range map[int64]uint64{0: 1 << 30, 1: 16 << 20, 192 << 20: 48 << 20, 64 << 30: 1 << 30} {
		if got := (Staging{MemoryLimit: limit}).Buffer(); got != want {
			t.Errorf("with a limit of %d the buffer is %d, want %d", limit, got, want)
		}
	}
}

// What is accepted is usable: no setting can bring a line into CRIU's
// configuration that is not its own.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{
		"", "lock_timeout = \"10s\"\n", "[criu]\npath = \"/x/criu\"\n", "shells = \"end\"",
		"[criu.options]\na = true\nb = \"c d\"\ne = [\"f\", \"g\"]\nh = 1\n", "[criu.options]\n\"\" = \"x\"", "a = {b = 1}",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		config, err := parse(data)
		if err != nil {
			return
		}
		if config.LockTimeout <= 0 || config.Shells != Refuse && config.Shells != End {
			t.Errorf("accepted %+v", config)
		}
		for name, value := range config.CRIU.Options {
			checkLines(t, name, value)
		}
	})
}

// checkLines checks that all lines made of an option set that option.
func checkLines(t *testing.T, name string, value any) {
	t.Helper()
	lines, err := CRIULines(name, value)
	if err != nil {
		t.Errorf("%s = %v was accepted, and then: %v", name, value, err)
	}
	for line := range strings.Lines(lines) {
		fields := strings.Fields(line)
		if len(fields) == 0 || fields[0] != name || !strings.HasSuffix(line, "\n") || strings.ContainsAny(line, "#\\") {
			t.Errorf("%s = %q makes the line %q", name, value, line)
		}
	}
}
