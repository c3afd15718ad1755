// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"debug/buildinfo"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"golang.org/x/mod/module"
)

// part is something of others that is in a release.
type part struct {
	name, version, purl string
}

// licenceForm are the names of files with licences and notices.
var licenceForm = regexp.MustCompile(`(?i)^((un)?licen[cs]e|copying|notice|patents)([.-].*)?$`)

// parts returns what of others is in a tree, and the text of each one's licence: the modules that
// its Go programs were linked from, and what else names itself by a file PARTS, "name version purl"
// a line, beside the licence texts in a directory named licences.
func (r release) parts(t tree) (found []part, licences tree, err error) {
	modules := map[string]string{} // by path@version
	for _, f := range t {
		info, err := buildinfo.Read(bytes.NewReader(f.data))
		if err != nil {
			continue // no Go program
		}
		modules["std@"+strings.TrimPrefix(info.GoVersion, "go")] = ""
		for _, m := range info.Deps {
			if m.Replace != nil {
				m = m.Replace
			}
			if m.Version != "" && m.Version != "(devel)" {
				modules[m.Path+"@"+m.Version] = m.Path
			}
		}
		if p := info.Main; p.Version != "" && p.Version != "(devel)" && !strings.HasPrefix(p.Path, "github.com/gpuckpt/") {
			modules[p.Path+"@"+p.Version] = p.Path
		}
	}
	for key := range modules {
		name, version, _ := strings.Cut(key, "@")
		dir, err := r.moduleDir(name, version)
		if err != nil {
			return nil, nil, err
		}
		p := part{name, version, "pkg:golang/" + key}
		texts, err := texts(dir, filepath.Join("licences", strings.ReplaceAll(key, "/", "_")))
		if err != nil {
			return nil, nil, err
		}
		if len(texts) == 0 {
			return nil, nil, fmt.Errorf("%s has no licence text in %s", key, dir)
		}
		found, licences = append(found, p), append(licences, texts...)
	}
	for _, f := range t {
		if filepath.Base(f.name) != "PARTS" {
			continue
		}
		for line := range strings.Lines(string(f.data)) {
			fields := strings.Fields(line)
			if len(fields) != 3 {
				return nil, nil, fmt.Errorf("%s: %q is not a name, a version and a purl", f.name, line)
			}
			found = append(found, part{fields[0], fields[1], fields[2]})
		}
	}
	for _, name := range []string{"LICENSE", "CHANGELOG.md", "docs/config.example.toml"} {
		data, err := os.ReadFile(filepath.Join(r.source, name))
		if err != nil {
			return nil, nil, err
		}
		licences = append(licences, file{name: filepath.Base(name), mode: 0o644, data: data})
	}
	licences.sort()
	return found, licences, nil
}

// moduleDir returns the directory of a module's source, or Go's own.
func (r release) moduleDir(name, version string) (string, error) {
	if name == "std" {
		out, err := exec.Command("go", "env", "GOROOT").Output()
		return strings.TrimSpace(string(out)), err
	}
	out, err := exec.Command("go", "env", "GOMODCACHE").Output()
	if err != nil {
		return "", err
	}
	escaped, err := module.EscapePath(name)
	return filepath.Join(strings.TrimSpace(string(out)), escaped+"@"+version), err
}

// texts reads the licences of a directory, and names them below another.
func texts(dir, below string) (t tree, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.IsDir() || !licenceForm.MatchString(e.Name()) {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		t = append(t, file{name: filepath.Join(below, e.Name()), mode: 0o644, data: data})
	}
	return t, nil
}

// bom writes the list of parts in CycloneDX's form.
func (r release) bom(parts []part) error {
	slices.SortFunc(parts, func(a, b part) int { return strings.Compare(a.purl, b.purl) })
	parts = slices.Compact(parts)
	list := cdx.NewBOM()
	list.Metadata = &cdx.Metadata{
		Timestamp: r.time.Format(time.RFC3339),
		Component: &cdx.Component{Type: cdx.ComponentTypeApplication, Name: "gpuckpt", Version: r.version, PackageURL: "pkg:golang/github.com/gpuckpt/gpuckpt@" + r.version},
	}
	var components []cdx.Component
	for _, p := range parts {
		components = append(components, cdx.Component{Type: cdx.ComponentTypeLibrary, BOMRef: p.purl, Name: p.name, Version: p.version, PackageURL: p.purl})
	}
	list.Components = &components
	var b bytes.Buffer
	if err := cdx.NewBOMEncoder(&b, cdx.BOMFileFormatJSON).SetPretty(true).Encode(list); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "gpuckpt-"+r.version+".cdx.json"), b.Bytes(), 0o644)
}
