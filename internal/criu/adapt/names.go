// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package adapt

import (
	"crypto/rand"
	"path"
	"regexp"
	"sync"

	skunix "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-unix"
)

// longestName is UNIX_PATH_MAX of linux/un.h.
const longestName = 108

// driverName is the abstract name that NVIDIA's driver 580 listens on in every CUDA process:
// cuda-uvmfd-, the inode number of the process's pid namespace, and its pid there. The other form
// is what a restore makes of it. Zeros may follow: they are a part of the name.
var driverName = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^\x00(cuda-uvmfd-)(?:[0-9]{1,20}-[0-9]{1,10}|gpuckpt-[A-Z2-7]{26})\x00*$`)
})

// name renames the driver's socket where others are in the network namespace. The old name may be
// taken: by the program that was checkpointed, by another restore, or by a program whose pid
// namespace has got the inode number of the old one. Kept, it would be in the way of such a program:
// its cuInit fails with 304. The new name is random, and no driver asks for one of its form.
func (p *Plan) name(s *skunix.UnixSkEntry) {
	if at := path.Join(s.GetNameDir(), string(s.GetName())); s.GetDeleted() && s.NameDir != nil && len(at) < longestName {
		s.Name, s.NameDir = []byte(at), nil // CRIU makes the directory of a whole path alone
	}
	if !p.place.Shared {
		return
	}
	old := string(s.GetName())
	part := driverName().FindStringSubmatch(old)
	if part == nil {
		return
	}
	if p.names[old] == "" { // a connection has the name of the socket that it came in by
		p.names[old] = "\x00" + part[1] + "gpuckpt-" + rand.Text()
	}
	s.Name = []byte(p.names[old])
}
