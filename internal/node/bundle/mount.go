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

// Uncovered returns those of a spec's mounts that no later one covers: ctr adds one at "/dev/shm/" to that at
// "/dev/shm". Nothing leads to a covered one, and CRIU would have two mounts at one path.
func Uncovered(all []specs.Mount) (left []specs.Mount) {
	at := func(m specs.Mount) string { return path.Clean("/" + m.Destination) }
	for i, m := range all {
		by := slices.IndexFunc(all[i+1:], func(o specs.Mount) bool { return at(o) == at(m) })
		needs := func(option string) bool { return option == "tmpcopyup" || option == "remount" } // what is there
		if by < 0 || slices.ContainsFunc(all[i+1+by].Options, needs) ||
			slices.ContainsFunc(all[i+1:i+1+by], func(o specs.Mount) bool { return strings.HasPrefix(at(o)+"/", at(m)+"/") }) {
			left = append(left, m)
		}
	}
	return left
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
