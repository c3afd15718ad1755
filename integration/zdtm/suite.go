// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package zdtm runs CRIU's own suite in containers: each of its static tests is a program that makes
// some state, is checkpointed and restored, and then says whether the state is as it was. hack/setup
// builds them (hack/recipes/zdtm.bash). They are restored by runc's shim and by this project's, in
// place and as an image, and what passes there must pass here, or be on the list of exceptions with a
// reason. `make test-zdtm` runs all, `make test` a sample by this project's shim alone.
package zdtm

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// Test is one test of the suite.
type Test struct {
	Name string
	// Args is its command line, to be run in /zdtm/static.
	Args []string
	// Flags are the suite's own: "suid" for one that must begin as root, "noauto".
	Flags []string
	// Options are lines of CRIU's configuration, which the suite gives it.
	Options []string
	// Skip is why it is not tried, or empty.
	Skip string
}

// ofHost matches what would change the machine that the tests run on.
var ofHost = regexp.MustCompile(`^(apparmor|binfmt_misc|cgroup|console$|rtc$|selinux|uptime_grow$|vt$)`)

// Load reads the suite from the directory that hack/setup made.
func Load(dir string) ([]Test, error) {
	commands, err := os.ReadFile(filepath.Join(dir, "commands"))
	if err != nil {
		return nil, fmt.Errorf("read CRIU's suite: %w", err)
	}
	var tests []Test
	for line := range strings.Lines(string(commands)) {
		args := strings.Fields(line)
		test := Test{Name: filepath.Base(args[0]), Args: args}
		if err := test.describe(dir); err != nil {
			return nil, fmt.Errorf("read CRIU's suite: %w", err)
		}
		tests = append(tests, test)
	}
	return tests, nil
}

// described matches the entries of a description, which is a dictionary in Python.
var described = regexp.MustCompile(`["'](flags|arch|opts|dopts|ropts)["']\s*:\s*["']([^"']*)["']`)

// architectures are the suite's names of Go's.
var architectures = map[string]string{"amd64": "x86_64", "arm64": "aarch64"}

// describe reads the test's description, which most have.
func (t *Test) describe(dir string) error {
	text, err := os.ReadFile(filepath.Join(dir, t.Name+".desc"))
	if err != nil && !os.IsNotExist(err) {
		return err
	}
	entries := make(map[string]string)
	for _, entry := range described.FindAllStringSubmatch(string(text), -1) {
		entries[entry[1]] = entry[2]
	}
	t.Flags = strings.Fields(entries["flags"])
	t.Options = configuration(entries["opts"] + " " + entries["dopts"] + " " + entries["ropts"])
	_, err = os.Stat(filepath.Join(dir, t.Name))
	switch arch := entries["arch"]; {
	case err != nil:
		t.Skip = "not built"
	case ofHost.MatchString(t.Name):
		t.Skip = "would change the machine"
	case slices.Contains(t.Flags, "noauto"):
		t.Skip = "not run by CRIU's own suite either"
	case arch != "" && !slices.Contains(strings.Fields(arch), architectures[runtime.GOARCH]):
		t.Skip = "of another processor"
	}
	return nil
}

// configuration makes lines of a configuration out of a command line, "--ghost-limit 1M --file-locks".
func configuration(line string) []string {
	var lines []string
	for word := range strings.FieldsSeq(line) {
		if name, is := strings.CutPrefix(word, "--"); is {
			lines = append(lines, strings.Replace(name, "=", " ", 1))
		} else if len(lines) > 0 {
			lines[len(lines)-1] += " " + word
		}
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}
