// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// settingsDirs are the directories of the node that Options.Settings has files for. Private keys are where
// containerd's decoder has them, too.
var settingsDirs = map[string]string{
	"keys":            "/etc/gpuckpt/keys",
	"recipients":      "/etc/gpuckpt/recipients",
	"decryption-keys": config.DecryptionKeys,
}

// agentKeys is where the agent of a cluster keeps the keys of its nodes.
const agentKeys = "/var/lib/gpuckpt/keys"

// isSetting reports whether a file of the node is one that Options.Settings may have.
func isSetting(path string) bool {
	return path == config.Path || slices.Contains(slices.Collect(maps.Values(settingsDirs)), filepath.Dir(path))
}

// writeSettings makes the files of Settings the node's.
func (o Options) writeSettings(c *changes) (wanted map[string]bool, err error) {
	texts := map[string]string{}
	data, err := os.ReadFile(filepath.Join(o.Settings, "config.toml"))
	if err == nil {
		texts[config.Path] = string(data)
		if err = config.Check(data); err != nil {
			err = fmt.Errorf("the node's configuration: %w", err)
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	for name, dir := range settingsDirs {
		// Below each there are directories, one for each source, whose files are links that Kubernetes makes.
		found, err := filepath.Glob(filepath.Join(o.Settings, name, "*", "*"))
		if err != nil {
			return nil, err
		}
		for _, file := range found {
			if strings.HasPrefix(filepath.Base(file), "..") {
				continue
			}
			data, err := os.ReadFile(file)
			if err != nil {
				return nil, err
			}
			path := filepath.Join(dir, filepath.Base(file))
			if _, twice := texts[path]; twice {
				return nil, fmt.Errorf("two files are called %s: give one another name", filepath.Base(file))
			}
			texts[path] = string(data)
		}
	}
	wanted = map[string]bool{}
	for _, path := range slices.Sorted(maps.Keys(texts)) {
		mode := fs.FileMode(0o644)
		if filepath.Dir(path) == settingsDirs["decryption-keys"] {
			mode = 0o600
		}
		if err := c.writeAs(path, texts[path], mode); err != nil {
			return nil, err
		}
		wanted[path] = true
	}
	return wanted, nil
}

// dropSettings removes files that an Install before has written of its Settings, and that are wanted no more.
func (o Options) dropSettings(r *record, wanted map[string]bool, result *Result) error {
	var errs []error
	r.Edits = slices.DeleteFunc(r.Edits, func(e edit) bool {
		if !isSetting(e.Path) || wanted[e.Path] {
			return false
		}
		if err := os.Remove(o.at(e.Path)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
			return false
		}
		result.Changed = append(result.Changed, e.Path)
		return true
	})
	return errors.Join(errs...)
}
