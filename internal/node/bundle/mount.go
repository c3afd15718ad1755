// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// ParseMount reads a mount in the words of ctr: type=bind,src=PATH,dst=PATH,options=rbind:ro.
func ParseMount(s string) (m specs.Mount, _ error) {
	for part := range strings.SplitSeq(s, ",") {
		key, value, _ := strings.Cut(part, "=")
		switch key {
		case "type":
			m.Type = value
		case "source", "src":
			m.Source = value
		case "destination", "dst":
			m.Destination = value
		case "options":
			m.Options = strings.Split(value, ":")
		default:
			return m, fmt.Errorf("mount %q: unknown part %q", s, key)
		}
	}
	if m.Destination == "" {
		return m, fmt.Errorf("mount %q has no dst=", s)
	}
	m.Destination = path.Clean("/" + m.Destination) // as a default mount has it, which this one replaces
	return m, nil
}

// Bars returns what a mount's options bar: of ro, nosuid, nodev and noexec those that it has. Some, such as rro,
// are for what is mounted below it, too.
func Bars(m specs.Mount) (bars []string) {
	for _, option := range []string{"ro", "nosuid", "nodev", "noexec"} {
		if slices.Contains(m.Options, option) || slices.Contains(m.Options, "r"+option) {
			bars = append(bars, option)
		}
	}
	return bars
}
