// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/config"
)

// SettingsName is the file in the bundle that runc hands to CRIU.
const SettingsName = "gpuckpt-criu.conf"

// runcSettings is the file that runc hands to CRIU when nobody says otherwise.
const runcSettings = "/etc/criu/runc.conf"

// Settings are what a container's configuration file for CRIU is made of.
type Settings struct {
	// Bundle is the container's bundle, where the file is written.
	Bundle string
	// Restoring reports whether the file is for a restore.
	Restoring bool
	// View has the options of the node and of the container.
	View config.View
	// Devices are the container's GPU devices, whose files CRIU dumps and restores by gpuckpt's
	// plugin; nil for none.
	Devices []Device
	// Gate has CRIU wait at the gate after a restore, see ListenGate.
	Gate bool
	// GhostLimit is the size up to which CRIU dumps a file that is open and has no name any more,
	// in bytes; 0 leaves it to CRIU, which takes 1 MiB.
	GhostLimit uint64
}

// base returns the file that CRIU would read without this project; "" for none.
func (s Settings) base() string {
	if own, set := s.View.Annotations[annotations.CRIUConfig]; set {
		return own
	}
	return runcSettings
}

// Write writes the container's configuration file for CRIU: what the container would
// have had without this project, then the node's options and the container's. CRIU
// lets later lines win, and all of them win over what runc asks for.
func (s Settings) Write(ctx context.Context, r Runner) error {
	options, err := s.View.CRIUOptions()
	if err != nil {
		return err
	}
	base := ""
	if name := s.base(); name != "" {
		text, err := os.ReadFile(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // runc ignores a missing file as well
			return fmt.Errorf("read CRIU settings: %w", err)
		}
		base = string(text)
		if base != "" && !strings.HasSuffix(base, "\n") {
			base += "\n"
		}
	}
	isSet := func(name string) bool {
		_, set := options[name]
		return set || hasOption(base, name)
	}
	if !isSet("tcp-established") && !isSet("tcp-close") {
		options[tcpDefault(s.Restoring)] = true
	}
	// A program whose files lost their names, such as the semaphores of Python's
	// multiprocessing, is dumped without being asked: CRIU links these files anew beside where
	// they were.
	if !isSet("link-remap") {
		options["link-remap"] = true
	}
	if !isSet("ghost-limit") && s.GhostLimit > 0 {
		options["ghost-limit"] = int64(s.GhostLimit)
	}
	libdir := optionValue(base, "libdir")
	if own, ok := options["libdir"].(string); ok {
		libdir = own
	}
	text := base
	for _, name := range slices.Sorted(maps.Keys(options)) {
		lines, err := config.CRIULines(name, options[name])
		if err != nil {
			return fmt.Errorf("CRIU option: %w: %w", err, errdefs.ErrInvalidArgument)
		}
		text += lines
	}
	if !isSet("network-lock") {
		criu, _ := Find(r, s.View.CRIU.Path) // without one runc's own error says so
		if lock := cachedNetworkLock(ctx, r, criu); lock != LockIptables {
			text += "network-lock " + lock + "\n"
		}
	}
	dir, err := s.libdir(libdir)
	if err != nil {
		return err
	}
	if dir != "" {
		text += "libdir " + dir + "\n"
	}
	if err := os.WriteFile(filepath.Join(s.Bundle, SettingsName), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write CRIU settings: %w", err)
	}
	return nil
}

// tcpDefault returns the option that decides what becomes of established TCP
// connections where nobody has decided. A dump takes them as they are, and so does
// not fail because of one. A restore closes them: their other ends know nothing of
// the restore, and the address may be another. Who wants them open, which is right
// for connections inside the container, sets tcp-established.
func tcpDefault(restoring bool) string {
	if restoring {
		return "tcp-close"
	}
	return "tcp-established"
}

// hasOption reports whether a configuration text sets an option.
func hasOption(text, name string) bool {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] == name {
			return true
		}
	}
	return false
}

// optionValue returns the value that a configuration text sets last for an option, "" for none.
func optionValue(text, name string) (value string) {
	for line := range strings.Lines(text) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == name {
			value = strings.Trim(strings.Join(fields[1:], " "), `"`)
		}
	}
	return value
}
