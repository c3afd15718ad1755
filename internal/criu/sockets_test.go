// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"path/filepath"
	"slices"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fown"
	skopts "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-opts"
	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
	"google.golang.org/protobuf/proto"
)

// unixSocket is an entry of files.img.
func unixSocket(inode, peer, flags uint32) *fdinfo.FileEntry {
	none, one := proto.Uint32(0), proto.Uint32(1) // a stream, connected
	return &fdinfo.FileEntry{Type: fdinfo.FdTypes_UNIXSK.Enum(), Id: &inode, Usk: &skunix.UnixSkEntry{
		Id: &inode, Ino: &inode, Type: one, State: one, Flags: none, Uflags: &flags, Backlog: none, Peer: &peer,
		Fown: &fown.FownEntry{Uid: none, Euid: none, Signum: none, PidType: none, Pid: none},
		Opts: &skopts.SkOptsEntry{SoSndbuf: none, SoRcvbuf: none, SoSndTmoSec: proto.Uint64(0), SoSndTmoUsec: proto.Uint64(0), SoRcvTmoSec: proto.Uint64(0), SoRcvTmoUsec: proto.Uint64(0)},
		Name: []byte{},
	}}
}

// A socket whose other end is not in the dump is found; one with both ends, one that listens, one
// that is connected to itself and one that a plugin restores are not.
func TestTornSockets(t *testing.T) {
	dir := t.TempDir()
	found := func(entries ...proto.Message) []TornSocket {
		t.Helper()
		writeFile(t, filepath.Join(dir, "files.img"), string(imageOf(t, "FILES", entries...)))
		torn, err := Open(dir).tornSockets()
		if err != nil {
			t.Fatal(err)
		}
		return torn
	}
	whole := []proto.Message{unixSocket(10, 11, 0), unixSocket(12, 0, 0), unixSocket(11, 10, 0), unixSocket(13, 13, 0), unixSocket(14, 99, uskCallback)}
	if got := found(whole...); len(got) > 0 {
		t.Errorf("of whole connections %v are torn", got)
	}
	want := []TornSocket{{20, 21}}
	if got := found(append(whole, unixSocket(20, 21, 0))...); !slices.Equal(got, want) {
		t.Errorf("torn are %v, want %v", got, want)
	}
}
