// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package snapshotter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/atomicwriter"
	"github.com/opencontainers/go-digest"
)

// record is what of an arrival outlives the process: a file below the root, from the first layer of
// GPU state until all is here.
type record struct {
	Namespace string `json:"namespace"`
	// Ref is the image's name, with the digest of Manifest.
	Ref      string `json:"ref"`
	Manifest string `json:"manifest"`
	// Parts are the layers that this arrival fetches.
	Parts []*part `json:"parts"`
	// CRIU is the snapshot of CRIU's images, "" if there is none yet. Dir is where the feed is, Roots
	// what it tells first, and Files are all files of GPU state of the image.
	CRIU  string   `json:"criu,omitempty"`
	Dir   string   `json:"dir,omitempty"`
	Roots []string `json:"roots,omitempty"`
	Files []string `json:"files,omitempty"`
}

// recordsDir is the directory of the records below a root.
const recordsDir = "arriving"

func (r *record) path(root string) string {
	return filepath.Join(root, recordsDir, digest.FromString(arrivalKey(r.Namespace, r.Manifest)).Encoded()+".json")
}

// save writes the record, or removes it if there is nothing to record. a.mu is held.
func (a *arrival) save() error {
	if len(a.Parts) == 0 && a.CRIU == "" {
		return a.forget()
	}
	data, err := json.Marshal(a.record)
	if err != nil {
		return err
	}
	path := a.path(a.s.o.Root)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return fmt.Errorf("record what arrives: %w", err)
	}
	if err := atomicwriter.WriteFile(path, data, 0o600); err != nil {
		return fmt.Errorf("record what arrives: %w", err)
	}
	return nil
}

func (a *arrival) forget() error {
	if err := os.Remove(a.path(a.s.o.Root)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove the record of what has arrived: %w", err)
	}
	return nil
}

// goOn goes on with what is on record. What has no snapshot any more is dropped.
func (s *Snapshotter) goOn() error {
	paths, err := filepath.Glob(filepath.Join(s.o.Root, recordsDir, "*.json"))
	if err != nil {
		return err
	}
	for _, path := range paths {
		if err := s.goOnWith(path); err != nil {
			return fmt.Errorf("go on with what %s records: %w", path, err)
		}
	}
	return nil
}

func (s *Snapshotter) goOnWith(path string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	a := newArrival(s, record{})
	if err := json.Unmarshal(data, &a.record); err != nil {
		return err
	}
	return a.goOn(s.ctx)
}

func (a *arrival) goOn(ctx context.Context) (err error) {
	here := func(name string) bool {
		_, serr := a.s.Stat(ctx, name)
		if serr != nil && !errdefs.IsNotFound(serr) {
			err = errors.Join(err, serr)
		}
		return serr == nil
	}
	a.Parts = slices.DeleteFunc(a.Parts, func(p *part) bool { return !here(p.Name) })
	if a.CRIU != "" && !here(a.CRIU) {
		a.CRIU, a.Dir = "", ""
	}
	if err == nil {
		err = a.save()
	}
	if err != nil {
		return err
	}
	a.s.arrivals[arrivalKey(a.Namespace, a.Manifest)] = a
	for _, p := range a.Parts {
		a.s.parts[p.Name] = a
	}
	a.mu.Lock()
	if a.CRIU != "" {
		a.s.parts[a.CRIU] = a
		err = a.tell()
	}
	for _, p := range a.Parts {
		if err == nil && !p.Arrived {
			a.start(p)
		}
	}
	a.mu.Unlock()
	a.end()
	return err
}
