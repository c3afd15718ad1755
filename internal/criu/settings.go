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
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
)

// annotation begins the annotations that set an option of CRIU for one container:
// dev.gpuckpt.criu.tcp-established = "true".
const annotation = "dev.gpuckpt.criu."

// annotations are the options that a container may set for itself. Others
// (action-script, libdir, external) reach beyond the container, so that only the
// node's configuration may set them.
var annotations = []string{
	"tcp-established", "tcp-close", "skip-in-flight", "file-locks", "link-remap",
	"ghost-limit", "timeout", "manage-cgroups", "network-lock",
}

// SettingsName is the file in the bundle that runc hands to CRIU.
const SettingsName = "gpuckpt-criu.conf"

// RuncSettings is the file that runc hands to CRIU when nobody says otherwise.
const RuncSettings = "/etc/criu/runc.conf"

// Settings are what a container's configuration file for CRIU is made of.
type Settings struct {
	// Bundle is the container's bundle, where the file is written.
	Bundle string
	// Base is the file that CRIU would read without this project; "" for none.
	Base string
	// Restoring reports whether the file is for a restore.
	Restoring bool
	// Path, PluginDir and Options are the node's: its criu, where criu looks for
	// plugins, and options by their names on CRIU's command line. All may be empty.
	Path, PluginDir string
	Options         map[string]any
	// Annotations are the container's.
	Annotations map[string]string
}

// Write writes the container's configuration file for CRIU: what the container would
// have had without this project, then the node's options, then the container's
// annotations. CRIU lets later lines win, and all of them win over what runc asks
// for.
func (s Settings) Write(ctx context.Context, r Runner) error {
	options, err := s.options()
	if err != nil {
		return err
	}
	base := ""
	if s.Base != "" {
		text, err := os.ReadFile(s.Base)
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
	lines, err := Lines(options)
	if err != nil {
		return fmt.Errorf("CRIU option: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	text := base + lines
	if !isSet("network-lock") {
		criu, _ := Find(r, s.Path) // without one runc's own error says so
		if lock := cachedNetworkLock(ctx, r, criu); lock != LockIptables {
			text += "network-lock " + lock + "\n"
		}
	}
	if !isSet("libdir") {
		dir, err := pluginsWithoutCUDA(s.PluginDir, filepath.Join(s.Bundle, "criu-plugins"))
		if err != nil {
			return err
		}
		if dir != "" {
			text += "libdir " + dir + "\n"
		}
	}
	if err := os.WriteFile(filepath.Join(s.Bundle, SettingsName), []byte(text), 0o600); err != nil {
		return fmt.Errorf("write CRIU settings: %w", err)
	}
	return nil
}

// options returns the node's options and, in their place, the container's.
func (s Settings) options() (map[string]any, error) {
	options := maps.Clone(s.Options)
	if options == nil {
		options = make(map[string]any)
	}
	for key, value := range s.Annotations {
		name, ours := strings.CutPrefix(key, annotation)
		if !ours {
			continue
		}
		if !slices.Contains(annotations, name) {
			return nil, fmt.Errorf("annotation %s: a container may set only %s%s: %w", key, annotation, strings.Join(annotations, ", "), errdefs.ErrInvalidArgument)
		}
		options[name] = annotationValue(value)
	}
	return options, nil
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

// annotationValue reads "true", "false" and "", which is true, and leaves all else a string.
func annotationValue(s string) any {
	switch s {
	case "true", "":
		return true
	case "false":
		return false
	}
	return s
}

// Lines returns options as lines of CRIU's configuration file, in the order of their
// names; see criu(8), "CONFIGURATION FILES". An option that is false has no line.
func Lines(options map[string]any) (string, error) {
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(options)) {
		lines, err := linesOf(name, options[name])
		if err != nil {
			return "", err
		}
		b.WriteString(lines)
	}
	return b.String(), nil
}

// linesOf returns the lines of one option.
func linesOf(name string, value any) (string, error) {
	if name == "" {
		return "", errors.New("an option of CRIU has no name")
	}
	for _, r := range name {
		if r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9') {
			return "", fmt.Errorf("%q is not a name of an option of CRIU", name)
		}
	}
	switch v := value.(type) {
	case bool:
		if v {
			return name + "\n", nil
		}
		return "", nil
	case int64:
		return name + " " + strconv.FormatInt(v, 10) + "\n", nil
	case string:
		if v == "" || strings.ContainsAny(v, "\"'#\\") || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return "", fmt.Errorf("%s: value %q is empty or has quotes, '#', a backslash or control characters", name, v)
		}
		if strings.Contains(v, " ") {
			v = `"` + v + `"`
		}
		return name + " " + v + "\n", nil
	case []any:
		var b strings.Builder
		for _, each := range v {
			s, ok := each.(string)
			if !ok {
				return "", fmt.Errorf("%s: a list may hold strings only, not %v", name, each)
			}
			lines, err := linesOf(name, s)
			if err != nil {
				return "", err
			}
			b.WriteString(lines)
		}
		return b.String(), nil
	}
	return "", fmt.Errorf("%s: value %v is neither true, false, a string, a whole number nor a list of strings", name, value)
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
