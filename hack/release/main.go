// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command release makes the files of a release out of what hack/release/build built: archives,
// packages, the image for nodes, the chart, the list of parts, checksums and their signature. The
// same input gives the same bytes: all times are the commit's, and nothing of the machine goes in.
package main

import (
	"crypto/sha256"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// release is what is made, and out of what.
type release struct {
	version string
	time    time.Time
	arches  []string // by Go's names
	source  string   // the root of the repository
	built   string   // a directory with a tree for each architecture, agent-ARCH, demo-amd64, kubectl/OS-ARCH
	out     string
}

func main() {
	var r release
	var epoch int64
	var key string
	flag.StringVar(&r.version, "version", "", "version, such as 1.2.3")
	flag.Int64Var(&epoch, "epoch", 0, "time of the commit, in seconds")
	flag.StringVar(&r.source, "source", ".", "root of the repository")
	flag.StringVar(&r.built, "built", "", "what was built")
	flag.StringVar(&r.out, "out", "", "directory to make")
	flag.StringVar(&key, "key", "", "Ed25519 private key in PEM (PKCS #8) to sign the checksums with")
	arches := flag.String("arches", "amd64 arm64", "architectures, by Go's names")
	flag.Parse()
	r.time, r.arches = time.Unix(epoch, 0).UTC(), strings.Fields(*arches)
	if err := r.make(key); err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

// make makes everything in a directory beside out, and then puts that in its place.
func (r release) make(key string) (err error) {
	target := r.out
	if r.out, err = os.MkdirTemp(filepath.Dir(target), ".dist-*"); err != nil {
		return err
	}
	defer os.RemoveAll(r.out)
	var images []nodeImage
	var parts []part
	read := func(name, licences string) (tree, error) {
		t, err := readTree(filepath.Join(r.built, name))
		if err != nil {
			return nil, err
		}
		found, texts, err := r.parts(t)
		parts = append(parts, found...)
		t.add(licences, texts)
		return t, err
	}
	for _, arch := range r.arches {
		t, err := read(arch, "share/doc/gpuckpt")
		if err != nil {
			return err
		}
		name := fmt.Sprintf("gpuckpt-%s-linux-%s", r.version, arch)
		if err := r.archive(filepath.Join(r.out, name+".tar.gz"), name, t); err != nil {
			return err
		}
		if err := r.packages("gpuckpt", arch, t); err != nil {
			return err
		}
		agent, err := read("agent-"+arch, "agent/licences")
		if err != nil {
			return err
		}
		image, err := r.image(arch, append(slices.Clone(t), agent...))
		if err != nil {
			return err
		}
		images = append(images, image)
	}
	demo, err := read("demo-amd64", "share/doc/gpuckpt-demo")
	if err != nil {
		return err
	}
	name := fmt.Sprintf("gpuckpt-demo-%s-linux-amd64", r.version)
	if err := r.archive(filepath.Join(r.out, name+".tar.gz"), name, demo); err != nil {
		return err
	}
	if err := r.packages("gpuckpt-demo", "amd64", demo); err != nil {
		return err
	}
	plugins, err := os.ReadDir(filepath.Join(r.built, "kubectl"))
	if err != nil {
		return err
	}
	for _, platform := range plugins {
		plugin, err := read(filepath.Join("kubectl", platform.Name()), "licences")
		if err != nil {
			return err
		}
		name := fmt.Sprintf("kubectl-gpuckpt-%s-%s", r.version, platform.Name())
		if err := r.archive(filepath.Join(r.out, name+".tar.gz"), name, plugin); err != nil {
			return err
		}
	}
	if err := r.layout(images); err != nil {
		return err
	}
	if err := r.chart(); err != nil {
		return err
	}
	if err := r.bom(parts); err != nil {
		return err
	}
	sources, err := readTree(filepath.Join(r.built, "sources"))
	if err != nil {
		return err
	}
	for _, f := range sources {
		if err := os.WriteFile(filepath.Join(r.out, filepath.Base(f.name)), f.data, 0o644); err != nil {
			return err
		}
	}
	if err := r.checksums(key); err != nil {
		return err
	}
	if err := os.Chmod(r.out, 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(target); err != nil {
		return err
	}
	return os.Rename(r.out, target)
}

// file is one file of a tree.
type file struct {
	name string // relative, with slashes
	mode fs.FileMode
	link string // of a symbolic link
	data []byte
}

// tree is a directory of files, by name.
type tree []file

// readTree reads a directory. Modes are reduced to whether a file can be executed.
func readTree(root string) (t tree, err error) {
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		f := file{mode: 0o644}
		if f.name, err = filepath.Rel(root, path); err != nil {
			return err
		}
		if d.Type() == fs.ModeSymlink {
			f.mode = 0o777
			f.link, err = os.Readlink(path)
		} else {
			st, serr := d.Info()
			if serr == nil && st.Mode()&0o111 != 0 {
				f.mode = 0o755
			}
			if f.data, err = os.ReadFile(path); err == nil {
				err = serr
			}
		}
		t = append(t, f)
		return err
	})
	t.sort()
	return t, err
}

// add adds files below a directory.
func (t *tree) add(dir string, more tree) {
	for _, f := range more {
		f.name = dir + "/" + f.name
		*t = append(*t, f)
	}
	t.sort()
}

func (t tree) sort() {
	slices.SortFunc(t, func(a, b file) int { return strings.Compare(a.name, b.name) })
}

// dirs returns the directories of a tree.
func (t tree) dirs() (dirs []string) {
	for _, f := range t {
		for dir := path.Dir(f.name); dir != "."; dir = path.Dir(dir) {
			if !slices.Contains(dirs, dir) {
				dirs = append(dirs, dir)
			}
		}
	}
	slices.Sort(dirs)
	return dirs
}

// checksums writes the SHA-256 of each file, in the form of sha256sum, and its signature.
func (r release) checksums(key string) error {
	t, err := readTree(r.out)
	if err != nil {
		return err
	}
	var b strings.Builder
	for _, f := range t {
		fmt.Fprintf(&b, "%x  %s\n", sha256.Sum256(f.data), f.name)
	}
	if err := os.WriteFile(filepath.Join(r.out, "SHA256SUMS"), []byte(b.String()), 0o644); err != nil {
		return err
	}
	if key == "" {
		fmt.Fprintln(os.Stderr, "release: SHA256SUMS is not signed: no key was given (KEY=FILE)")
		return nil
	}
	signature, err := sign(key, []byte(b.String()))
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(r.out, "SHA256SUMS.sig"), signature, 0o644)
}
