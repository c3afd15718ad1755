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
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// SettingsName is the file in the bundle that runc hands to CRIU.
const SettingsName = "gpuckpt-criu.conf"

// runcSettings is the file that runc hands to CRIU when nobody says otherwise.
const runcSettings = "/etc/criu/runc.conf"

// Settings are what a container's configuration file for CRIU is made of.
type Settings struct {
	// Bundle is the container's bundle, where the file is written.
	Bundle string
	// View has the options of the node and of the container.
	View config.View
	// Devices are the container's GPU devices, whose files CRIU dumps and restores by gpuckpt's
	// plugin; nil for none.
	Devices []Device
	// Gate has CRIU wait at the gate after a restore, see ListenGate.
	Gate bool
	// Sandbox is what CRIU sees of the host; nil for all of it.
	Sandbox *Sandbox
	// Outside are mounts from outside that runc tells CRIU nothing of.
	Outside []bundle.Outside
	// ReadsNoFile has CRIU open no file of the container's while it dumps, for the build ID that a
	// restore would compare: this breaks a lease. A restore compares the sizes in any case.
	ReadsNoFile bool
	// Watched are names of files that a program watches and CRIU does not find by itself. Without, it takes what
	// the kernel opens by its handle, which is another file in another container.
	Watched []string
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
	base, options, err := s.read()
	if err != nil {
		return err
	}
	isSet := func(name string) bool {
		_, set := options[name]
		return set || hasOption(base, name)
	}
	// A dump takes established TCP connections as they are, and so does not fail because of one. In
	// a restore their own entries decide, see ConnectionsDecided.
	if !decidesTCP(base, options) {
		options["tcp-established"] = true
	}
	// A program whose files lost their names, such as the semaphores of Python's
	// multiprocessing, is dumped without being asked: CRIU links these files anew beside where
	// they were.
	if !isSet("link-remap") {
		options["link-remap"] = true
	}
	// A server under load always has a connection that it has not accepted yet, a kubelet's probe at
	// least. Such a connection stays where it is, and a restore does not have it.
	if !isSet("skip-in-flight") {
		options["skip-in-flight"] = true
	}
	// Locks are dumped whatever the client says. A restore gives CRIU hardly any of them, see package
	// filelocks.
	options["file-locks"] = true
	if s.ReadsNoFile {
		options["file-validation"] = "filesize"
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
	if len(s.Watched) > 0 {
		text += "force-irmap\n"
	}
	for _, name := range s.Watched {
		lines, err := config.CRIULines("irmap-scan-path", name)
		if err != nil {
			return fmt.Errorf("tell CRIU of a file that is watched: %w: %w", err, errdefs.ErrFailedPrecondition)
		}
		text += lines
	}
	for _, o := range s.Outside {
		mount := o.Place + "]:" + o.Key // of a dump
		if s.Gate {
			mount = o.Key + "]:" + o.Source
		}
		lines, err := config.CRIULines("external", "mnt["+mount)
		if err != nil {
			return fmt.Errorf("tell CRIU of mount %s: %w", o.Place, err)
		}
		text += lines
	}
	if !isSet("network-lock") {
		if lock := s.networkLock(ctx, r); lock != LockIptables {
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

// read returns what CRIU would be told without this project, and the options of the node and of the
// container.
func (s Settings) read() (base string, options map[string]any, err error) {
	if options, err = s.View.CRIUOptions(); err != nil {
		return "", nil, err
	}
	if name := s.base(); name != "" {
		text, err := os.ReadFile(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) { // runc ignores a missing file as well
			return "", nil, fmt.Errorf("read CRIU settings: %w", err)
		}
		base = string(text)
		if base != "" && !strings.HasSuffix(base, "\n") {
			base += "\n"
		}
	}
	return base, options, nil
}

// networkLock returns the way that the shim chooses.
func (s Settings) networkLock(ctx context.Context, r Runner) string {
	criu, _ := Find(r, s.View.CRIU.Path) // without one runc's own error says so
	return cachedNetworkLock(ctx, r, criu, networkLockCache)
}

// LocksNetwork reports whether CRIU keeps packets away while it dumps and restores sockets.
func (s Settings) LocksNetwork(ctx context.Context, r Runner) (bool, error) {
	base, options, err := s.read()
	if err != nil {
		return false, err
	}
	if way, set := options["network-lock"]; set {
		return way != LockSkip, nil
	}
	if way := optionValue(base, "network-lock"); way != "" {
		return way != LockSkip, nil
	}
	return s.networkLock(ctx, r) != LockSkip, nil
}

// ConnectionsDecided reports whether somebody has said what becomes of established TCP connections,
// of all of them alike. Else package adapt decides for each.
func (s Settings) ConnectionsDecided() (bool, error) {
	base, options, err := s.read()
	return decidesTCP(base, options), err
}

// KeepsConnections reports whether somebody has asked that all established TCP connections are restored
// open, those to other programs too.
func (s Settings) KeepsConnections() (bool, error) {
	base, options, err := s.read()
	asked, set := options["tcp-established"]
	return asked == true || !set && hasOption(base, "tcp-established"), err
}

func decidesTCP(base string, options map[string]any) bool {
	return slices.ContainsFunc([]string{"tcp-established", "tcp-close"}, func(name string) bool {
		_, set := options[name]
		return set || hasOption(base, name)
	})
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
