// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// installed are the parts of a release that a node needs.
var installed = []string{"bin", "lib/gpuckpt", "share/doc/gpuckpt", "share/man/man1"}

// copyTree copies the source below the prefix: every file beside its place first, then all by
// rename. It returns the files, as the node sees them. The record has them before the first one is there, and
// keeps those of the version before. What they replace stays beside them until end.
func (c *changes) copyTree() (files []string, err error) {
	o, r := c.o, c.record
	if _, err := os.Stat(filepath.Join(o.Source, "bin", ShimName)); err != nil {
		return nil, fmt.Errorf("%s is no release of gpuckpt: %w", o.Source, err)
	}
	from := map[string]string{}
	for _, part := range installed {
		err := filepath.WalkDir(filepath.Join(o.Source, part), func(path string, d fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil // a part that the release does not have
			}
			if err != nil || d.IsDir() {
				return err
			}
			name, err := filepath.Rel(o.Source, path)
			if err != nil {
				return err
			}
			target := filepath.Join(o.Prefix, name)
			files, from[target] = append(files, target), path
			return r.makeDirs(o.Root, filepath.Dir(target))
		})
		if err != nil {
			return nil, err
		}
	}
	r.Files = slices.Compact(slices.Sorted(slices.Values(slices.Concat(files, r.Files))))
	if err := o.writeRecord(r); err != nil { // for an Uninstall after this is killed
		return nil, err
	}
	staged := map[string]string{}
	defer func() {
		for _, temp := range staged {
			err = errors.Join(err, os.Remove(temp))
		}
	}()
	for _, target := range files {
		temp, err := o.stage(from[target], target)
		if temp != "" {
			staged[target] = temp
		}
		if err != nil {
			return nil, err
		}
	}
	// The shim comes last: whoever starts it finds the rest.
	others := slices.DeleteFunc(slices.Clone(files), func(target string) bool { return target == o.shim() })
	for _, target := range append(others, o.shim()) {
		temp := staged[target]
		if temp == "" {
			continue
		}
		kept := beside(o.at(target), "old")
		_ = os.Remove(kept)
		if err := os.Link(o.at(target), kept); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		c.programs = append(c.programs, target)
		if err := os.Rename(temp, o.at(target)); err != nil {
			return nil, err
		}
		delete(staged, target)
		c.result.Changed = append(c.result.Changed, target)
	}
	return files, nil
}

// putBack makes the programs what they were before copyTree.
func (c *changes) putBack() (err error) {
	for _, target := range slices.Backward(c.programs) {
		path := c.o.at(target)
		failed := os.Rename(beside(path, "old"), path)
		if errors.Is(failed, fs.ErrNotExist) {
			failed = os.Remove(path)
		}
		if !errors.Is(failed, fs.ErrNotExist) {
			err = errors.Join(err, failed)
		}
		c.o.removeBeside(target)
	}
	return err
}

// end ends an Install: with an error the node becomes what old has, what it was or what is to stay.
func (c *changes) end(ctx context.Context, old record, err error) error {
	if err == nil {
		for _, file := range old.Files {
			c.o.removeBeside(file)
		}
		for _, e := range old.Edits {
			c.o.removeBeside(e.Path)
		}
		return nil
	}
	failed := errors.Join(c.rollback(), c.putBack())
	if c.restarted { // containerd may have died of what is new: it gets back what it had
		err = errors.Join(err, c.o.restart(context.WithoutCancel(ctx)))
	}
	if failed != nil {
		return errors.Join(err, failed, c.o.writeRecord(c.record)) // for Uninstall
	}
	said := old.Version + " stays installed"
	if old.Prefix != "" {
		failed = c.o.writeRecord(&old)
	} else if said, failed = "the node is as it was", os.Remove(c.o.at(c.o.Record)); errors.Is(failed, fs.ErrNotExist) {
		failed = nil
	}
	for _, dir := range slices.Backward(c.record.Dirs[len(old.Dirs):]) {
		_ = os.Remove(c.o.at(dir))
	}
	return errors.Join(fmt.Errorf("%w; %s", err, said), failed)
}

// beside returns where a file's next or last content is meanwhile: "new" or "old".
func beside(path, what string) string {
	return filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".gpuckpt-"+what)
}

// removeBeside removes what an Install that was killed has left beside a file.
func (o Options) removeBeside(file string) {
	for _, what := range []string{"new", "old"} {
		_ = os.Remove(beside(o.at(file), what))
	}
}

// stage copies a file beside its target, unless the target has its content and mode already.
func (o Options) stage(from, target string) (temp string, err error) {
	st, err := os.Lstat(from)
	if err != nil {
		return "", err
	}
	if st.Mode()&fs.ModeSymlink != 0 {
		link, err := os.Readlink(from)
		if now, _ := os.Readlink(o.at(target)); err != nil || now == link {
			return "", err
		}
		temp = beside(o.at(target), "new")
		_ = os.Remove(temp)
		return temp, os.Symlink(link, temp)
	}
	data, err := os.ReadFile(from)
	if err != nil {
		return "", err
	}
	if now, err := os.Lstat(o.at(target)); err == nil && now.Mode() == st.Mode() && now.Size() == st.Size() {
		if have, err := os.ReadFile(o.at(target)); err == nil && bytes.Equal(have, data) {
			return "", nil
		}
	}
	return writeTemp(o.at(target), data, st.Mode().Perm())
}

// makeDirs makes a directory of the node, and records each that was not there.
func (r *record) makeDirs(root, dir string) error {
	var missing []string
	for d := dir; d != "/" && d != "."; d = filepath.Dir(d) {
		if _, err := os.Stat(filepath.Join(root, d)); err == nil {
			break
		}
		missing = append(missing, d)
	}
	for _, d := range slices.Backward(missing) {
		if err := os.Mkdir(filepath.Join(root, d), 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		r.Dirs = append(r.Dirs, d)
	}
	return nil
}

// writeTemp writes a file beside its place, and to the disk: after a power cut a name may have no content else.
func writeTemp(path string, data []byte, mode fs.FileMode) (temp string, err error) {
	temp = beside(path, "new")
	_ = os.Remove(temp) // of one that was killed
	f, err := os.OpenFile(temp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	_, err = f.Write(data)
	return temp, errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
}

// replaceFile writes a file by rename.
func replaceFile(path string, data []byte, mode fs.FileMode) error {
	temp, err := writeTemp(path, data, mode)
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil && temp != "" {
		err = errors.Join(err, os.Remove(temp))
	}
	return err
}

// edit is a change of a file of the node's.
type edit struct {
	Path string `json:"path"`
	// Made is whether the whole file was made; otherwise Added was put into it. One that others may write to was
	// made of Rest and Added: it stays without Added if it has another text by then.
	Made  bool   `json:"made,omitempty"`
	Added string `json:"added,omitempty"`
	Rest  string `json:"rest,omitempty"`
	// Link is where it leads, if it is a link that was made.
	Link string `json:"link,omitempty"`
}

// changes are edits of the node's files. Each is in the record before it is made, so that an
// Uninstall finds those of an Install that was killed.
type changes struct {
	o      Options
	record *record
	result *Result
	// before has the files as they were, and the edits that the record had.
	before map[string][]byte // nil: no such file
	links  map[string]string // where they led; "": no such link
	edits  []edit
	// programs are the files that copyTree has replaced or made.
	programs  []string
	restarted bool // containerd, which may have read the edits
}

func newChanges(o Options, r *record, result *Result) *changes {
	return &changes{o: o, record: r, result: result, before: map[string][]byte{}, links: map[string]string{}, edits: slices.Clone(r.Edits)}
}

// write makes a file that has this text. A file of that name that is not the installer's must have
// the text already.
func (c *changes) write(path, text string) error { return c.writeAs(path, text, 0o644) }

// writeAs is write, with the mode of the file.
func (c *changes) writeAs(path, text string, mode fs.FileMode) error {
	data, err := os.ReadFile(c.o.at(path))
	mine := slices.IndexFunc(c.record.Edits, func(e edit) bool { return e.Path == path && e.Made })
	switch {
	case err == nil && string(data) == text:
		return nil
	case err == nil && mine < 0:
		return fmt.Errorf("%s exists and is not of this installer: remove it, and run this again", path)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if mine < 0 {
		c.record.Edits = append(c.record.Edits, edit{Path: path, Made: true})
	}
	if err := c.record.makeDirs(c.o.Root, filepath.Dir(path)); err != nil {
		return err
	}
	return c.change(path, data, []byte(text), mode)
}

// make makes a file that others may write to, where none is.
func (c *changes) make(path, rest, added string) error {
	others := slices.DeleteFunc(c.record.Edits, func(e edit) bool { return e.Path == path })
	c.record.Edits = append(others, edit{Path: path, Made: true, Rest: rest, Added: added})
	return c.write(path, rest+added)
}

// link makes a symbolic link where nothing is, or a link that the installer has made.
func (c *changes) link(path, to string) error {
	now, _ := os.Readlink(c.o.at(path))
	if now == to {
		return nil
	}
	if err := c.record.makeDirs(c.o.Root, filepath.Dir(path)); err != nil {
		return err
	}
	c.record.Edits = append(slices.DeleteFunc(c.record.Edits, func(e edit) bool { return e.Path == path }), edit{Path: path, Link: to})
	if err := c.o.writeRecord(c.record); err != nil {
		return err
	}
	c.links[path] = now
	if err := relink(c.o.at(path), to); err != nil {
		return err
	}
	c.result.Changed = append(c.result.Changed, path)
	return nil
}

// relink makes a link lead elsewhere; "" removes it.
func relink(path, to string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) || to == "" {
		return err
	}
	return os.Symlink(to, path)
}

// insert puts text into a file at an offset.
func (c *changes) insert(path string, at int, text string) error {
	data, err := os.ReadFile(c.o.at(path))
	if err != nil {
		return err
	}
	c.record.Edits = append(c.record.Edits, edit{Path: path, Added: text})
	return c.edit(path, data, slices.Concat(data[:at], []byte(text), data[at:]))
}

// edit is change of a file that keeps its mode.
func (c *changes) edit(path string, from, to []byte) error {
	st, err := os.Stat(c.o.at(path))
	if err != nil {
		return err
	}
	return c.change(path, from, to, st.Mode().Perm())
}

// change replaces a file that is in the record's edits.
func (c *changes) change(path string, from, to []byte, mode fs.FileMode) error {
	if err := c.o.writeRecord(c.record); err != nil {
		return err
	}
	if _, known := c.before[path]; !known {
		c.before[path] = from
	}
	c.result.Changed = append(c.result.Changed, path)
	return replaceFile(c.o.at(path), to, mode)
}

// rollback makes all files what they were when the changes began.
func (c *changes) rollback() error {
	for path, data := range c.before {
		var err error
		if data == nil {
			err = os.Remove(c.o.at(path))
		} else if st, serr := os.Stat(c.o.at(path)); serr == nil {
			err = replaceFile(c.o.at(path), data, st.Mode().Perm())
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		c.result.Changed = slices.DeleteFunc(c.result.Changed, func(p string) bool { return p == path })
	}
	for path, to := range c.links {
		if err := relink(c.o.at(path), to); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		c.result.Changed = slices.DeleteFunc(c.result.Changed, func(p string) bool { return p == path })
	}
	clear(c.links)
	c.before, c.record.Edits = map[string][]byte{}, slices.Clone(c.edits)
	return nil
}

// undo takes back all edits of the record, the last first. An edit whose text is gone from a file
// was taken back by somebody else.
func (c *changes) undo() error {
	for len(c.record.Edits) > 0 {
		last := len(c.record.Edits) - 1
		e := c.record.Edits[last]
		if err := c.takeBack(e); err != nil {
			return err
		}
		c.o.removeBeside(e.Path)
		c.record.Edits = c.record.Edits[:last]
		c.result.Changed = append(c.result.Changed, e.Path)
	}
	return nil
}

func (c *changes) takeBack(e edit) error {
	path := c.o.at(e.Path)
	if e.Link != "" {
		if now, _ := os.Readlink(path); now != e.Link { // somebody else's by now
			return nil
		}
		return os.Remove(path)
	}
	data, err := os.ReadFile(path)
	if err == nil && e.Made && (e.Rest == "" || string(data) == e.Rest+e.Added) {
		return os.Remove(path)
	}
	if errors.Is(err, fs.ErrNotExist) || err == nil && !strings.Contains(string(data), e.Added) {
		return nil
	}
	if err != nil {
		return err
	}
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	return replaceFile(path, []byte(strings.Replace(string(data), e.Added, "", 1)), st.Mode().Perm())
}
