// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trials

import (
	"fmt"
	"maps"
	"slices"
	"time"
)

// Kept are things that must stay as they are from Keep on, each by its name.
type Kept struct {
	// Look returns what they are like now.
	Look func() map[string]string

	first   map[string]string // what they must be like
	skipped map[string]bool   // what changes by itself
	known   map[string]string // what is otherwise, and was reported
}

// Keep has them stay as they are now. What was otherwise at an earlier look changes by itself, and is
// not compared. Keep returns what they are like, and the names of what is not compared.
func (k *Kept) Keep(earlier map[string]string) (now map[string]string, skipped []string) {
	k.first, k.skipped, k.known = k.Look(), make(map[string]bool), make(map[string]string)
	for name := range union(earlier, k.first) {
		if was, there := earlier[name]; k.first[name] != was || !there {
			k.skipped[name] = true
		}
	}
	return k.first, slices.Sorted(maps.Keys(k.skipped))
}

// Changed returns what is not as it was at Keep, but for what Accept has taken. What is so for a moment
// only, as a list that is read while another restore mounts something, is looked at again.
func (k *Kept) Changed() []string {
	for range 2 {
		if len(k.differences(k.Look())) == 0 {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return k.describe(k.Look())
}

// Accept takes what is otherwise now for known: Changed returns it again if it becomes yet another.
func (k *Kept) Accept() {
	now := k.Look()
	for _, name := range k.differences(now) {
		k.known[name] = now[name]
	}
}

// differences returns the names of what is neither as it was nor known.
func (k *Kept) differences(now map[string]string) (names []string) {
	for name := range union(k.first, now) {
		if known, ok := k.known[name]; now[name] != k.first[name] && !k.skipped[name] && (!ok || known != now[name]) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func (k *Kept) describe(now map[string]string) (texts []string) {
	for _, name := range k.differences(now) {
		was, there := k.first[name]
		if !there {
			texts = append(texts, name+" is new")
			continue
		}
		is, at := now[name], 0
		for at < min(len(was), len(is)) && was[at] == is[at] {
			at++
		}
		texts = append(texts, fmt.Sprintf("%s: from byte %d on it was %.200q and is %.200q", name, at, was[at:], is[at:]))
	}
	return texts
}

// union returns the names that either has.
func union(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	if all == nil {
		all = make(map[string]string)
	}
	maps.Copy(all, b)
	return all
}
