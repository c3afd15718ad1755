// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
)

func unixSocket(name string) *fdinfo.FileEntry {
	return &fdinfo.FileEntry{Usk: &skunix.UnixSkEntry{Name: []byte(name), State: new(uint32(unix.BPF_TCP_LISTEN)), Peer: new(uint32(0))}}
}

// The driver's socket gets a name of its own in each restore, also in a restore of what a restore
// has named. Nothing else of its entry is changed, and no other socket's name.
func TestDriverName(t *testing.T) {
	const old = "\x00cuda-uvmfd-4026532513-1"
	renamed := func(place Place, name string) string {
		f := unixSocket(name)
		want := proto.Clone(f).(*fdinfo.FileEntry)
		Make(place, []*fdinfo.FileEntry{f}).Edit(f)
		got := string(f.GetUsk().GetName())
		want.Usk.Name = []byte(got)
		if !proto.Equal(f, want) {
			t.Errorf("%q: more than the name is changed: %v", name, f)
		}
		return got
	}
	seen := map[string]bool{old: true}
	for _, name := range []string{old, old + "\x00", old, renamed(Place{Shared: true}, old)} {
		got := renamed(Place{Shared: true}, name)
		if seen[got] || !strings.HasPrefix(got, "\x00cuda-uvmfd-gpuckpt-") || len(got) > 100 {
			t.Errorf("%q became %q", name, got)
		}
		seen[got] = true
	}
	if got := renamed(Place{}, old); got != old {
		t.Errorf("in a network namespace of its own it became %q", got)
	}
	for _, name := range []string{
		"", "\x00", "\x00cuda-uvmfd-", "\x00cuda-uvmfd-1", "\x00cuda-uvmfd-1-x", "\x00cuda-uvmfd-1-2-3", "\x00cuda-uvmfd-1-2\x00x", "\x00a" + old[1:],
		"cuda-uvmfd-1-2\x00", "/tmp" + "/cuda-uvmfd-1-2\x00", "\x00cuda-uvmfd-gpuckpt-x", "\x00\x00cuda-uvmfd-1-2", "\x00cuda-uvmfd-1-2\n",
	} {
		if got := renamed(Place{Shared: true}, name); got != name {
			t.Errorf("%q became %q", name, got)
		}
	}

	// A connection has the name of the socket that it came in by.
	listens, connected, another := unixSocket(old), unixSocket(old), unixSocket(old+"1")
	connected.Usk.State = new(uint32(1))
	p := Make(Place{Shared: true}, nil)
	for _, f := range []*fdinfo.FileEntry{listens, connected, another} {
		p.Edit(f)
	}
	name := func(f *fdinfo.FileEntry) string { return string(f.GetUsk().GetName()) }
	if name(listens) != name(connected) || name(listens) == name(another) {
		t.Errorf("%q, its connection %q, another %q", name(listens), name(connected), name(another))
	}
}

// A removed name below a directory becomes a whole path, if it is short enough for one.
func TestRemovedName(t *testing.T) {
	long := "/" + strings.Repeat("d", 110)
	for _, test := range []struct {
		dir, want string
		deleted   bool
	}{{"/d", "/d/s\x00", true}, {"/d", "./s\x00", false}, {long, "./s\x00", true}} {
		f := unixSocket("./s\x00")
		f.Usk.NameDir, f.Usk.Deleted = &test.dir, &test.deleted
		Make(Place{}, nil).Edit(f)
		if got := string(f.GetUsk().GetName()); got != test.want || (f.GetUsk().NameDir == nil) != (got != "./s\x00") {
			t.Errorf("%v: %q below %q", test, got, f.GetUsk().GetNameDir())
		}
	}
}
