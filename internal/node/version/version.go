// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package version is what a program of this project was built from. A release sets it when it
// links; every other build has what the Go tool recorded.
package version

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"time"
)

// The linker sets these for `make release`. They are empty in other builds.
var (
	Number string // "1.2.3"
	Commit string // the commit's hash
	Date   string // the commit's, as YYYY-MM-DD
)

// Info is what a program was built from: Date is the commit's.
type Info struct {
	Version  string `json:"version"`
	Commit   string `json:"commit"`
	Date     string `json:"date"`
	Platform string `json:"platform"`
}

// Of returns what this program was built from.
func Of() Info {
	number, commit, date := recorded()
	return Info{number, commit, date, runtime.GOOS + "/" + runtime.GOARCH}
}

// String returns all of that in one line.
func String() string {
	is := Of()
	return fmt.Sprintf("%s, commit %s of %s, %s", is.Version, is.Commit, is.Date, is.Platform)
}

// Short returns the version alone: "1.2.3", or what the Go tool recorded of it.
func Short() string {
	number, _, _ := recorded()
	return number
}

// Time returns the day of the commit, the zero time if it is unknown.
func Time() time.Time {
	_, _, date := recorded()
	day, _ := time.Parse(time.DateOnly, date)
	return day
}

func recorded() (number, commit, date string) {
	if Number != "" {
		return Number, Commit, Date
	}
	number, commit, date = "(devel)", "unknown", "unknown date"
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return number, commit, date
	}
	if v := info.Main.Version; v != "" {
		number = v
	}
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			commit = s.Value
		case "vcs.time":
			date, _, _ = strings.Cut(s.Value, "T")
		}
	}
	return number, commit, date
}

// Asked reports whether the arguments of a program, its name included, ask for its version and
// nothing else.
func Asked(args []string) bool {
	return len(args) == 2 && (args[1] == "--version" || args[1] == "-version" || args[1] == "-v")
}

// Beside returns the path of a file of the release that a program is of: beside the program, whose path may
// be a link, or in ../lib/gpuckpt of its directory.
func Beside(program, file string) (string, error) {
	program, err := filepath.EvalSymlinks(program)
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(program)
	lib := filepath.Join(dir, "..", "lib", "gpuckpt")
	for _, path := range []string{filepath.Join(dir, file), filepath.Join(lib, file)} {
		if st, err := os.Stat(path); err == nil && st.Mode().IsRegular() {
			return path, nil
		}
	}
	return "", fmt.Errorf("no %s in %s or %s: install gpuckpt anew", file, dir, lib)
}
