// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goreleaser/nfpm/v2"
	_ "github.com/goreleaser/nfpm/v2/deb" // the format
	"github.com/goreleaser/nfpm/v2/files"
	_ "github.com/goreleaser/nfpm/v2/rpm" // the format
	"golang.org/x/mod/semver"
)

// homepage is of the packages and the chart.
const homepage = "https://github.com/gpuckpt/gpuckpt"

// preRemove takes the runtime out of containerd's configuration, before the last version goes.
const preRemove = `#!/bin/sh
case "$1" in
remove | 0)
	if [ -e /var/lib/gpuckpt/installed.json ]; then
		/usr/bin/gpuckpt uninstall
	fi
	;;
esac
`

// packages writes a tree below /usr as a deb and an rpm.
func (r release) packages(name, arch string, t tree) (err error) {
	temp, err := os.MkdirTemp("", "gpuckpt-package-*")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(temp)) }()
	script := filepath.Join(temp, "preremove")
	if err := os.WriteFile(script, []byte(preRemove), 0o755); err != nil {
		return err
	}
	glibc := ""
	info := nfpm.Info{
		Name: name, Arch: arch, Platform: "linux", Version: r.version, Section: "admin", Priority: "optional",
		Maintainer: "The gpuckpt Authors <" + homepage + ">", Homepage: homepage, License: "Apache-2.0", MTime: r.time,
		Description: "Checkpoint and restore GPU containers\n A containerd runtime that wraps runc, with CRIU.",
	}
	for i, f := range t {
		glibc = newest(glibc, needsGlibc(f))
		content := &files.Content{Destination: path.Join("/usr", f.name), FileInfo: &files.ContentFileInfo{Mode: f.mode, MTime: r.time}}
		if f.link != "" {
			content.Type, content.Source = "symlink", f.link
		} else {
			content.Source = filepath.Join(temp, fmt.Sprint(i))
			if err := os.WriteFile(content.Source, f.data, 0o644); err != nil {
				return err
			}
		}
		info.Contents = append(info.Contents, content)
	}
	// rpm removes only directories that the package names.
	for _, dir := range t.dirs() {
		if !slices.Contains([]string{"bin", "lib", "share", "share/doc"}, dir) {
			info.Contents = append(info.Contents, &files.Content{Destination: path.Join("/usr", dir), Type: files.TypeDir, FileInfo: &files.ContentFileInfo{Mode: 0o755, MTime: r.time}})
		}
	}
	info.RPM.BuildHost, info.RPM.Summary = "localhost", "Checkpoint and restore GPU containers"
	if name == "gpuckpt" {
		info.Scripts.PreRemove = script
		info.Suggests = []string{"containerd", "runc"} // not more: they bring an old CRIU
	} else {
		info.Description = "Demonstration of gpuckpt without a GPU\n A software GPU, a program that uses it, and a containerd of their own."
		info.RPM.Summary = "Demonstration of gpuckpt without a GPU"
	}
	for format, needs := range map[string][]string{
		"deb": {"libc6 (>= " + glibc + ")", "gpuckpt (= " + debVersion(r.version) + ")"},
		"rpm": {"glibc >= " + glibc, "gpuckpt = " + r.version},
	} {
		if name == "gpuckpt" {
			needs = needs[:1]
		}
		if err := r.pack(info, format, needs); err != nil {
			return fmt.Errorf("make the %s of %s: %w", format, name, err)
		}
	}
	return nil
}

// debVersion is a version as nfpm writes it into a deb.
func debVersion(v string) string { return strings.Replace(v, "-", "~", 1) }

func (r release) pack(info nfpm.Info, format string, needs []string) error {
	info.Depends = needs
	packager, err := nfpm.Get(format)
	if err != nil {
		return err
	}
	if err := nfpm.PrepareForPackager(&info, format); err != nil {
		return err
	}
	var b bytes.Buffer
	if err := packager.Package(&info, &b); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, packager.ConventionalFileName(&info)), b.Bytes(), 0o644)
}

// needsGlibc returns the oldest glibc that a program runs with, "2.34", or "".
func needsGlibc(f file) (version string) {
	program, err := elf.NewFile(bytes.NewReader(f.data))
	if err != nil {
		return ""
	}
	symbols, err := program.ImportedSymbols()
	if err != nil {
		return ""
	}
	for _, s := range symbols {
		if v, ok := strings.CutPrefix(s.Version, "GLIBC_"); ok {
			version = newest(version, v)
		}
	}
	return version
}

func newest(a, b string) string {
	if semver.Compare("v"+a, "v"+b) >= 0 {
		return a
	}
	return b
}
