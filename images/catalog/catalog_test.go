// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package catalog

import (
	"crypto/rand"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
)

func TestObsolete(t *testing.T) {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	at := func(image, container string, hours int) Entry {
		return Entry{Image: "host:5000/job:" + image, Digest: digest.FromString(image), Container: container, Created: now.Add(-time.Duration(hours) * time.Hour)}
	}
	entries := []Entry{at("a3", "a", 3), at("a1", "a", 1), at("b5", "b", 5), at("a2", "a", 2), at("x9", "", 9)}
	// CRI's other names of an image, and images of another repository that say they are of the container.
	for _, name := range []string{"host:5000/job@" + entries[1].Digest.String(), digest.FromString("config").String()} {
		e := entries[1]
		e.Image = name
		entries = append(entries, e)
	}
	for range 3 {
		e := at(rand.Text(), "a", -1)
		e.Image = "host:5000/other/job:" + e.Image
		e.Used = true
		entries = append(entries, e)
	}
	used := at("a8", "a", 8)
	used.Used = true
	entries = append(entries, used)
	for _, c := range []struct {
		name  string
		rules Rules
		gone  []string
	}{
		{"one of each container", Rules{Keep: 1}, []string{"a2", "a3"}},
		{"by age alone", Rules{OlderThan: 3 * time.Hour}, []string{"a3", "b5", "x9"}},
		{"both must let it go", Rules{Keep: 2, OlderThan: 3 * time.Hour}, []string{"a3"}},
		{"of one container", Rules{Container: "b"}, []string{"b5"}},
		{"more than there are", Rules{Keep: 9}, nil},
	} {
		var gone []string
		for _, e := range c.rules.Obsolete(entries, now) {
			gone = append(gone, strings.TrimPrefix(e.Image, "host:5000/job:"))
		}
		slices.Sort(gone)
		if !slices.Equal(gone, c.gone) {
			t.Errorf("%s: %v would go, want %v", c.name, gone, c.gone)
		}
	}
	plain, signed := at("plain", "c", 1), at("signed", "c", 1)
	signed.named = now
	if gone := (Rules{Keep: 1}).Obsolete([]Entry{plain, signed}, now); len(gone) != 1 || gone[0].Image != plain.Image {
		t.Errorf("of a checkpoint and its signed copy %v would go", gone)
	}
	if entries[0].Image != "host:5000/job:a3" {
		t.Error("the entries have another order now")
	}
}
