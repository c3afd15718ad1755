// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"slices"
	"strings"
	"sync"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	filelock "github.com/checkpoint-restore/go-criu/v8/crit/images/file-lock"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/inventory"
	ipcmsg "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-msg"
	ipcsem "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-sem"
	ipcshm "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-shm"
	ipcvar "github.com/checkpoint-restore/go-criu/v8/crit/images/ipc-var"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/memfd"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/netdev"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pagemap"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pidns"
	pipedata "github.com/checkpoint-restore/go-criu/v8/crit/images/pipe-data"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/pstree"
	remapfilepath "github.com/checkpoint-restore/go-criu/v8/crit/images/remap-file-path"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/seccomp"
	skpacket "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-packet"
	tcpstream "github.com/checkpoint-restore/go-criu/v8/crit/images/tcp-stream"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/timens"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/tty"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/userns"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/utsns"
	"google.golang.org/protobuf/proto"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/internal/criu/tmpfs"
)

// ThreadsName is a file that package scheduling writes and reads.
const ThreadsName = "gpuckpt-threads.txt"

// SocketsName and RootName are files that package openfiles writes and reads, WatchesName one of package told,
// DifferentName one of package different. FilesName is that of gpuckpt's CRIU plugin, which told adds to.
const (
	SocketsName   = "gpuckpt-sockets.txt"
	RootName      = "gpuckpt-root.txt"
	WatchesName   = "gpuckpt-watches.txt"
	DifferentName = "gpuckpt-different.txt"
	FilesName     = "gpuckpt-files.txt"
)

// form is how a file is laid out.
type form int

const (
	entries     form = iota // two magic words, then entries, each behind its length
	lent                    // memory, and the content of a tmpfs, which package tmpfs reads
	descriptors             // JSON of runc's
	devices                 // lines of gpuckpt's CRIU plugin
	leftOut                 // a file that CRIU never reads in a restore: it does not get it
)

// Kind is what an image is, by its name.
type Kind struct {
	// Magic is go-criu's name of its magic number; "" for one without entries.
	Magic string
	name  func(string) bool // whether a file of that name is one
	form  form
	// entry returns an empty message for the entry of that number.
	entry func(n int) proto.Message
	// single reports whether there is one entry, always.
	single bool
	// large reports whether an image can have very many entries: each is looked at alone,
	// and they count against a budget of their own.
	large bool
}

// New returns an empty message for the entry of that number, of an image with entries.
func (k *Kind) New(n int) proto.Message { return k.entry(n) }

// message is a protobuf message that is made of T.
type message[T any] interface {
	*T
	proto.Message
}

// always returns an entry that has one type, whatever its number.
func always[T any, M message[T]](int) proto.Message { return M(new(T)) }

// Kinds are all images that a restore can need. CRIU 4.2 writes others that only older
// versions of it read, or that are for what a container does not have: they are refused
// with the rest.
var Kinds = sync.OnceValue(func() []Kind {
	return []Kind{
		{Magic: "INVENTORY", name: named("inventory"), entry: always[inventory.InventoryEntry], single: true},
		{Magic: "PSTREE", name: named("pstree"), entry: always[pstree.PstreeEntry]},
		{Magic: "CORE", name: numbered("core"), entry: always[criucore.CoreEntry], single: true},
		{Magic: "IDS", name: numbered("ids"), entry: always[criucore.TaskKobjIdsEntry], single: true},
		{Magic: "MM", name: numbered("mm"), entry: always[mm.MmEntry], single: true},
		{Magic: "FS", name: numbered("fs"), entry: always[fs.FsEntry], single: true},
		{Magic: "FDINFO", name: numbered("fdinfo"), entry: always[fdinfo.FdinfoEntry]},
		{Magic: "FILES", name: named("files"), entry: always[fdinfo.FileEntry]},
		{Magic: "MNTS", name: numbered("mountpoints"), entry: always[mnt.MntEntry]},
		{Magic: "CGROUP", name: named("cgroup"), entry: always[cgroup.CgroupEntry], single: true},
		{Magic: "SECCOMP", name: named("seccomp"), entry: always[seccomp.SeccompEntry], single: true},
		{Magic: "USERNS", name: numbered("userns"), entry: always[userns.UsernsEntry], single: true},
		{Magic: "UTSNS", name: numbered("utsns"), entry: always[utsns.UtsnsEntry], single: true},
		{Magic: "TIMENS", name: numbered("timens"), entry: always[timens.TimensEntry], single: true},
		{Magic: "PIDNS", name: numbered("pidns"), entry: always[pidns.PidnsEntry], single: true}, // of a pod's
		{Magic: "NETNS", name: numbered("netns"), entry: always[netdev.NetnsEntry], single: true},
		{Magic: "IPC_VAR", name: numbered("ipcns-var"), entry: always[ipcvar.IpcVarEntry], single: true},
		{Magic: "IPCNS_SHM", name: numbered("ipcns-shm"), entry: always[ipcshm.IpcShmEntry]},
		{Magic: "IPCNS_SEM", name: numbered("ipcns-sem"), entry: always[ipcsem.IpcSemEntry]},
		{Magic: "IPCNS_MSG", name: numbered("ipcns-msg"), entry: always[ipcmsg.IpcMsgEntry]}, // and messages, see layout
		{Magic: "REMAP_FPATH", name: named("remap-fpath"), entry: always[remapfilepath.RemapFilePathEntry]},
		{Magic: "GHOST_FILE", name: hexNumbered("ghost-file"), entry: ghostEntry},
		{Magic: "MEMFD_INODE", name: named("memfd"), entry: always[memfd.MemfdInodeEntry]},
		{Magic: "PIPES_DATA", name: named("pipes-data"), entry: always[pipedata.PipeDataEntry]},
		{Magic: "FIFO_DATA", name: named("fifo-data"), entry: always[pipedata.PipeDataEntry]},
		{Magic: "SK_QUEUES", name: named("sk-queues"), entry: always[skpacket.SkPacketEntry]},
		{Magic: "TCP_STREAM", name: hexNumbered("tcp-stream"), entry: always[tcpstream.TcpStreamEntry], single: true},
		{Magic: "TTY_INFO", name: named("tty-info"), entry: always[tty.TtyInfoEntry]},
		{Magic: "TTY_DATA", name: named("tty-data"), entry: always[tty.TtyDataEntry]},
		{Magic: "FILE_LOCKS", name: named("filelocks"), entry: always[filelock.FileLockEntry]},
		{Magic: "PAGEMAP", name: numbered("pagemap"), entry: pagemapEntry, large: true},
		{Magic: "PAGEMAP", name: numbered("pagemap-shmem"), entry: pagemapEntry, large: true},
		{name: numbered("pages"), form: lent},
		{name: between("tmpfs-dev-", decimal, 20, ".tar.gz.img"), form: lent},
		{name: among(tmpfs.ShmImage), form: lent},
		{name: among("descriptors.json"), form: descriptors},
		{name: among(FilesName), form: devices},
		{name: among(ThreadsName, SocketsName, RootName, WatchesName, DifferentName, images.MetadataName, "stats-restore", "restore.log", "criu-dump.log"), form: leftOut},
	}
})

// The digits of numbers in names.
const (
	decimal = "0123456789"
	hex     = decimal + "abcdef"
)

func among(names ...string) func(string) bool {
	return func(name string) bool { return slices.Contains(names, name) }
}

func named(name string) func(string) bool { return among(name + ".img") }

func numbered(name string) func(string) bool { return between(name+"-", decimal, 20, ".img") }

func hexNumbered(name string) func(string) bool { return between(name+"-", hex, 16, ".img") }

// between is for names that have a number, of at most so many digits, between two texts.
func between(before, digits string, most int, behind string) func(string) bool {
	return func(name string) bool {
		number, ok := strings.CutPrefix(name, before)
		if ok {
			number, ok = strings.CutSuffix(number, behind)
		}
		return ok && (number == "0" || number != "" && number[0] != '0' && len(number) <= most && strings.Trim(number, digits) == "")
	}
}

// pagemapEntry: the first says which pages-*.img has the memory, the others where it goes.
func pagemapEntry(n int) proto.Message {
	if n == 0 {
		return new(pagemap.PagemapHead)
	}
	return new(pagemap.PagemapEntry)
}

// ghostEntry: the first is of the removed file, the others of parts of its content.
func ghostEntry(n int) proto.Message {
	if n == 0 {
		return new(ghostfile.GhostFileEntry)
	}
	return new(ghostfile.GhostChunkEntry)
}

// KindOf returns the kind of a file by its name; nil for a file that is not known.
func KindOf(name string) *Kind {
	if images.IsAreaFile(name) || sign.IsSeal(name) || sign.Describes(name) {
		return &Kind{form: leftOut}
	}
	kinds := Kinds()
	for i := range kinds {
		if kinds[i].name(name) {
			return &kinds[i]
		}
	}
	return nil
}

// layout is what is read next of one image.
type layout struct {
	kind  *Kind
	n     int    // entries so far
	left  uint32 // messages of the queue that was read last
	ghost bool   // the content of a removed file comes in parts
}

// next returns an empty message for the next entry; nil if none may follow.
func (l *layout) next() proto.Message {
	switch {
	case l.n > 0 && l.kind.single, l.n > 0 && l.kind.Magic == "GHOST_FILE" && !l.ghost:
		return nil
	case l.left > 0:
		return new(ipcmsg.IpcMsg)
	}
	return l.kind.entry(l.n)
}

// toTheEnd is the size of data that has no other end than that of its file.
const toTheEnd = -1

// read takes an entry into account and returns the size of the data behind it, in bytes.
func (l *layout) read(m proto.Message) int64 {
	l.n++
	switch m := m.(type) {
	case *pipedata.PipeDataEntry:
		return int64(m.GetBytes())
	case *skpacket.SkPacketEntry:
		return int64(m.GetLength())
	case *tcpstream.TcpStreamEntry:
		return int64(m.GetInqLen()) + int64(m.GetOutqLen())
	case *ipcsem.IpcSemEntry:
		return roundUp(2*int64(m.GetNsems()), 8)
	case *ipcshm.IpcShmEntry:
		if m.GetInPagemaps() {
			return 0
		}
		return roundUp(int64(min(m.GetSize(), 1<<62)), 4)
	case *ipcmsg.IpcMsgEntry:
		l.left = m.GetQnum()
	case *ipcmsg.IpcMsg:
		l.left--
		return roundUp(int64(m.GetMsize()), 8)
	case *ghostfile.GhostFileEntry:
		if l.ghost = m.GetChunks(); !l.ghost {
			return toTheEnd
		}
	case *ghostfile.GhostChunkEntry:
		return int64(min(m.GetLen(), 1<<62))
	}
	return 0
}

// complete refuses an image that ends too early.
func (l *layout) complete() string {
	switch {
	case l.left > 0:
		return "messages of its last queue are missing"
	case l.n == 0 && l.kind.single:
		return "it has no entry"
	case l.n == 0 && strings.HasPrefix(l.kind.Magic, "PAGEMAP"):
		return "it has no head"
	}
	return ""
}

func roundUp(n, to int64) int64 { return (n + to - 1) / to * to }
