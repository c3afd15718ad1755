// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package vet

import (
	"archive/tar"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/checkpoint-restore/go-criu/v8/crit/images/cgroup"
	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fdinfo"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/fs"
	ghostfile "github.com/checkpoint-restore/go-criu/v8/crit/images/ghost-file"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mm"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/mnt"
	"github.com/checkpoint-restore/go-criu/v8/crit/images/regfile"
	skinet "github.com/checkpoint-restore/go-criu/v8/crit/images/sk-inet"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
)

// zoo unpacks a dump of CRIU 4.2.1 whose program has one of every kind of file, timer, mapping and
// IPC object that a restore takes, and returns its directory and its container's spec. The container
// has no capability.
func zoo(t testing.TB) (string, *specs.Spec) {
	t.Helper()
	packed, err := os.Open("testdata/zoo.tar.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer packed.Close()
	z, err := gzip.NewReader(packed)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, h.Name), data, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"core-1.img", "core-8.img", "core-9.img", "core-10.img"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			continue
		}
		f := parse(t, dir, name)
		if c := f.entries[0].message.(*criucore.CoreEntry).GetThreadCore().GetCreds(); c != nil {
			c.CapBnd, c.CapPrm, c.CapEff, c.CapInh, c.CapAmb = nil, nil, nil, nil, nil
		}
		f.write(t, dir)
	}
	data, err := os.ReadFile("testdata/config.json")
	if err != nil {
		t.Fatal(err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(data, spec); err != nil {
		t.Fatal(err)
	}
	return dir, spec
}

// file is an image in parts.
type file struct {
	name    string
	head    []byte
	entries []part
}

type part struct {
	message proto.Message
	data    []byte
}

func parse(t testing.TB, dir, name string) *file {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	f, at := &file{name: name, head: raw[:8]}, 8
	if name == "inventory.img" {
		f.head, at = raw[:4], 4
	}
	err = image.Open(dir).Each(name, func(e *image.Entry) error {
		at += 4 + int(binary.LittleEndian.Uint32(raw[at:]))
		f.entries = append(f.entries, part{proto.Clone(e.Message), raw[at : at+int(e.Data)]})
		at += int(e.Data)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *file) write(t testing.TB, dir string) {
	t.Helper()
	b := slices.Clone(f.head)
	for _, e := range f.entries {
		data, err := (proto.MarshalOptions{AllowPartial: true, Deterministic: true}).Marshal(e.message)
		if err != nil {
			t.Fatal(err)
		}
		b = append(binary.LittleEndian.AppendUint32(b, uint32(len(data))), data...)
		b = append(b, e.data...)
	}
	if err := os.WriteFile(filepath.Join(dir, f.name), b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// each calls do with every message of an entry, itself first.
func each(m protoreflect.Message, do func(protoreflect.Message)) {
	do(m)
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.Message() == nil:
		case fd.IsList():
			for i := range v.List().Len() {
				each(v.List().Get(i).Message(), do)
			}
		default:
			each(v.Message(), do)
		}
		return true
	})
}

// values are what a field is set to, by kinds.
func values(m protoreflect.Message, fd protoreflect.FieldDescriptor) map[string]protoreflect.Value {
	v := make(map[string]protoreflect.Value)
	add := func(kind string, value protoreflect.Value) {
		if fd.IsList() {
			list := m.NewField(fd).List()
			list.Append(value)
			value = protoreflect.ValueOfList(list)
		}
		v[kind] = value
	}
	switch fd.Kind() {
	case protoreflect.StringKind:
		for kind, s := range map[string]string{"path": "/proc/self/fd/126/../../etc", "way out": "../../../etc/shadow", "link": "/proc/self/exe", "NUL": "/a\x00b", "empty": "", "long": strings.Repeat("x", 5000)} {
			add(kind, protoreflect.ValueOfString(s))
		}
	case protoreflect.BytesKind:
		add("path", protoreflect.ValueOfBytes([]byte("/../../etc/x")))
		add("empty", protoreflect.ValueOfBytes(nil))
	case protoreflect.BoolKind:
		add("flag", protoreflect.ValueOfBool(!fd.IsList() && !m.Get(fd).Bool()))
	case protoreflect.EnumKind:
		for i := range fd.Enum().Values().Len() {
			n := fd.Enum().Values().Get(i).Number()
			add(fmt.Sprintf("number %d", n), protoreflect.ValueOfEnum(n))
		}
	case protoreflect.MessageKind:
		if fd.IsList() {
			add("empty", m.NewField(fd).List().NewElement())
		} else {
			v["empty"] = m.NewField(fd)
		}
	default:
		for _, n := range []uint64{0, 1, 3, 64, 0xfff, math.MaxUint32, math.MaxUint64} {
			kind := fmt.Sprintf("number %#x", n)
			switch fd.Kind() {
			case protoreflect.Uint32Kind, protoreflect.Fixed32Kind:
				add(kind, protoreflect.ValueOfUint32(uint32(n)))
			case protoreflect.Uint64Kind, protoreflect.Fixed64Kind:
				add(kind, protoreflect.ValueOfUint64(n))
			case protoreflect.Int32Kind, protoreflect.Sint32Kind:
				add(kind, protoreflect.ValueOfInt32(int32(n)))
			default:
				add(kind, protoreflect.ValueOfInt64(int64(n)))
			}
		}
	}
	if fd.IsList() && m.Get(fd).List().Len() > 0 { // one more, and one again and again
		old := m.Get(fd).List()
		for kind, times := range map[string]int{"twice": 1, "often": 70} {
			list := m.NewField(fd).List()
			for i := range old.Len() {
				list.Append(old.Get(i))
			}
			for range times {
				list.Append(old.Get(0))
			}
			v["repeated "+kind] = protoreflect.ValueOfList(list)
		}
	}
	return v
}

// instances bounds how many messages of one type a field is changed in, until it is refused once.
const instances = 24

// Every field of every message of a real dump is changed by every kind of value, taken away and
// repeated, and every message gets a field that nobody knows. Each change is refused, or the list of
// fields says why it is harmless. A rule that refuses no change of a field is no rule.
func TestEveryFieldOfAHostileImage(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector makes minutes of it: hack/test runs it without")
	}
	dir, spec := zoo(t)
	images := func() error { return Images(t.Context(), spec, criu.Open(dir), "") }
	if err := images(); err != nil {
		t.Fatalf("the dump as it was: %v", err)
	}
	names, err := image.Open(dir).Names()
	if err != nil {
		t.Fatal(err)
	}
	tried, refusedBy := make(map[protoreflect.FullName]int), make(map[protoreflect.FullName]int)
	unknown := make(map[protoreflect.FullName]bool)
	changes, refused, harmless, escapes := 0, 0, 0, 0
	for _, name := range names {
		if k := image.KindOf(name); k.Magic == "" {
			continue
		}
		f := parse(t, dir, name)
		for i := range f.entries {
			good := f.entries[i].message
			count := 0
			each(good.ProtoReflect(), func(protoreflect.Message) { count++ })
			for n := range count {
				// nth is that message in a copy of the entry.
				nth := func(c proto.Message) (found protoreflect.Message) {
					at := 0
					each(c.ProtoReflect(), func(m protoreflect.Message) {
						if at == n {
							found = m
						}
						at++
					})
					return found
				}
				try := func(change func(protoreflect.Message)) error {
					c := proto.Clone(good)
					change(nth(c))
					f.entries[i].message = c
					f.write(t, dir)
					f.entries[i].message = good
					changes++
					return images()
				}
				m := nth(good)
				if d := m.Descriptor(); !unknown[d.FullName()] {
					unknown[d.FullName()] = true
					if err := try(func(m protoreflect.Message) {
						m.SetUnknown(protowire.AppendVarint(protowire.AppendTag(nil, 999, protowire.VarintType), 1))
					}); err == nil {
						escapes++
						t.Errorf("%s: an unknown field of %s is let through", name, d.FullName())
					}
					refused++
				}
				for j := range m.Descriptor().Fields().Len() {
					fd := m.Descriptor().Fields().Get(j)
					listed := image.Fields()[fd.FullName()]
					most := 1
					if listed.May == image.Ruled {
						most = instances
					}
					if tried[fd.FullName()] >= most || refusedBy[fd.FullName()] > 0 && tried[fd.FullName()] > 3 {
						continue
					}
					tried[fd.FullName()]++
					all := values(m, fd)
					if listed.May == image.Any { // the largest and the smallest will do
						for _, kind := range []string{"number 0x3", "number 0x40", "number 0xfff", "number 0xffffffff"} {
							delete(all, kind)
						}
					}
					if m.Has(fd) {
						all["missing"] = protoreflect.Value{}
					}
					for kind, value := range all {
						err := try(func(m protoreflect.Message) {
							if value.IsValid() {
								m.Set(fd, value)
							} else {
								m.Clear(fd)
							}
						})
						switch {
						case err != nil:
							refused++
							refusedBy[fd.FullName()]++
						case listed.May == image.Refused && value.IsValid() && (!fd.IsList() || value.List().Len() > 0):
							escapes++
							t.Errorf("%s: entry %d: %s, %s: it is let through, and %s", name, i, fd.FullName(), kind, listed.Why)
						case listed.May == "":
							escapes++
							t.Errorf("%s: %s is not known", name, fd.FullName())
						default:
							harmless++
						}
					}
				}
			}
			f.entries[i].message = good
		}
		f.write(t, dir)
	}
	var never, unseen []string
	for name, listed := range image.Fields() {
		switch {
		case tried[name] == 0:
			unseen = append(unseen, string(name))
		case name == "inventory_entry.lsmtype": // TestAttacks has a spec with a profile
		case listed.May != image.Any && listed.May != image.Dropped && refusedBy[name] == 0:
			never = append(never, fmt.Sprintf("%s (%s %s)", name, listed.May, listed.Why))
		}
	}
	slices.Sort(never)
	slices.Sort(unseen)
	for _, name := range never {
		t.Errorf("no change of %s is refused", name)
	}
	t.Logf("%d fields, %d changes: %d refused, %d harmless by the list, %d let through; fields of messages that the dump does not have: %d (%s)",
		len(tried), changes, refused, harmless, escapes, len(unseen), strings.Join(unseen, " "))
}

// What the review of security did to images, and what it read that could be done (S1 to S5): each is
// refused, by the rule that is for it.
func TestAttacks(t *testing.T) {
	up := "/proc/self/fd/126" + strings.Repeat("/..", 30)
	for name, c := range map[string]struct {
		image  string
		change func(proto.Message) bool // reports whether it has
		spec   func(*specs.Spec)
		says   string
	}{
		"S2: a file by CRIU's descriptor": {"files.img", reg("/tmp/file", func(r *regfile.RegFileEntry) { r.Name = &up }), nil, "is not an absolute, clean path"},
		"S2: CRIU's own program":          {"files.img", reg("/proc/1/status", func(r *regfile.RegFileEntry) { r.Name = new("/proc/self/exe") }), nil, "leads to what another process has (exe)"},
		"S2: by a link in /dev":           {"files.img", reg("/dev/null", func(r *regfile.RegFileEntry) { r.Name = new("/dev/fd/126") }), nil, "symbolic link on the way"},
		"S2: a writable sysctl":           {"files.img", reg("/proc/meminfo", func(r *regfile.RegFileEntry) { r.Name, r.Flags = new("/proc/sysrq-trigger"), proto.Uint32(1) }), nil, "open for writing"},
		"S2: a file that is made":         {"files.img", reg("/tmp/file", func(r *regfile.RegFileEntry) { r.Flags = proto.Uint32(0o1101) }), nil, "flags 01100"},
		"S3: a mount's root":              {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.Root = new(strings.Repeat("/..", 30)) }), nil, "mount /run"},
		"S3: a clean root":                {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.Root = new("/etc") }), nil, "it is /etc of its file system"},
		"S3: of a volume":                 {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.RootDev = proto.Uint32(266338304) }), nil, "of the file system of a mount from outside"},
		"S3: a masked path":               {"mountpoints-13.img", mount("/proc/acpi", func(m *mnt.MntEntry) { m.Root = new("/x") }), nil, "/proc/acpi"},
		"S4: a volume's flag":             {"mountpoints-13.img", mount("/zoo", moved), nil, "mount /zoo is not ro"},
		"S4: the flag of /proc/sys":       {"mountpoints-13.img", mount("/proc/sys", moved), nil, "/proc/sys neither masks"},
		"S4: a mount at /dev/null":        {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.Mountpoint = new("/dev/null") }), nil, "mount /dev/null"},
		"S4: an old external mount":       {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.ExtMount = new(true) }), nil, "mnt_entry.ext_mount"},
		"S3: options":                     {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.Options = new("size=1t,x=y") }), nil, "mount /run"},
		"S3: more memory":                 {"mountpoints-13.img", mount("/run", func(m *mnt.MntEntry) { m.Options = new("size=9999999k") }), nil, "9999999k bytes"},
		"S5: a removed device":            {"ghost-file-2.img", ghostOf(0o020666), nil, "device"},
		"S5: a removed setuid file":       {"ghost-file-2.img", ghostOf(0o104755), nil, "setuid"},
		"S5: a privileged port":           {"files.img", inet(func(s *skinet.InetSkEntry) { s.SrcPort = proto.Uint32(22) }), nil, "CAP_NET_BIND_SERVICE"},
		"S5: a raw socket":                {"files.img", inet(func(s *skinet.InetSkEntry) { s.Type = proto.Uint32(3) }), nil, "inet_sk_entry.type"},
		"S5: a short address":             {"files.img", inet(func(s *skinet.InetSkEntry) { s.SrcAddr = nil }), nil, "words"},
		"S5: a prefix of a cgroup": {"cgroup.img", func(m proto.Message) bool {
			m.(*cgroup.CgroupEntry).Sets[0].Ctls[0].CgnsPrefix = proto.Uint32(9999)
			return true
		}, nil, "prefix"},
		"S1: a controller's name": {"cgroup.img", func(m proto.Message) bool {
			m.(*cgroup.CgroupEntry).Controllers[0].Cnames = []string{"../../x"}
			return true
		}, nil, "is no controller"},
		"S8: a shorter list of limits": {"core-1.img", core(func(c *criucore.CoreEntry) { c.Tc.Rlimits.Rlimits = nil }), nil, "have no RLIMIT_NOFILE"},
		"S8: a soft limit":             {"core-1.img", core(func(c *criucore.CoreEntry) { c.Tc.Rlimits.Rlimits[7].Cur = proto.Uint64(1 << 20) }), nil, "RLIMIT_NOFILE"},
		"S5: no security module":       {"inventory.img", func(proto.Message) bool { return true }, func(s *specs.Spec) { s.Process.ApparmorProfile = "unconfined-not" }, "AppArmor"},
		"a root of its own":            {"fs-1.img", func(m proto.Message) bool { m.(*fs.FsEntry).RootId = proto.Uint32(2); return true }, nil, "CAP_SYS_CHROOT"},
		"mappings over one another":    {"mm-1.img", func(m proto.Message) bool { v := m.(*mm.MmEntry).Vmas; v[1].Start = v[0].Start; return true }, nil, "overlaps"},
		"the host's namespace as a file": {"files.img", func(m proto.Message) bool {
			f := m.(*fdinfo.FileEntry).GetNsf()
			if f != nil {
				f.NsId = proto.Uint32(6)
			}
			return f != nil
		}, nil, "none of the container's"},
		"a watch by handle": {"files.img", func(m proto.Message) bool {
			f := m.(*fdinfo.FileEntry).GetIfy()
			if f != nil {
				f.Wd[0].FHandle.Path = nil
			}
			return f != nil
		}, nil, "CAP_DAC_READ_SEARCH"},
	} {
		t.Run(name, func(t *testing.T) {
			dir, spec := zoo(t)
			if c.spec != nil {
				c.spec(spec)
			}
			f := parse(t, dir, c.image)
			changed := false
			for i := range f.entries {
				changed = changed || c.change(f.entries[i].message)
			}
			if !changed {
				t.Fatal("the dump has nothing like it")
			}
			f.write(t, dir)
			err := Images(t.Context(), spec, criu.Open(dir), "")
			if err == nil || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %q", err, c.says)
			}
		})
	}
}

// moved takes the read-only flag to where a bind mount's is not looked for by CRIU.
func moved(m *mnt.MntEntry) {
	m.Flags, m.SbFlags = new(m.GetFlags()&^1), new(m.GetSbFlags()|1)
}

func reg(name string, change func(*regfile.RegFileEntry)) func(proto.Message) bool {
	return func(m proto.Message) bool {
		r := m.(*fdinfo.FileEntry).GetReg()
		if r.GetName() != name {
			return false
		}
		change(r)
		return true
	}
}

func mount(at string, change func(*mnt.MntEntry)) func(proto.Message) bool {
	return func(m proto.Message) bool {
		e := m.(*mnt.MntEntry)
		if e.GetMountpoint() != at {
			return false
		}
		change(e)
		return true
	}
}

func inet(change func(*skinet.InetSkEntry)) func(proto.Message) bool {
	return func(m proto.Message) bool {
		s := m.(*fdinfo.FileEntry).GetIsk()
		if s != nil {
			change(s)
		}
		return s != nil
	}
}

func core(change func(*criucore.CoreEntry)) func(proto.Message) bool {
	return func(m proto.Message) bool {
		change(m.(*criucore.CoreEntry))
		return true
	}
}

func ghostOf(mode uint32) func(proto.Message) bool {
	return func(m proto.Message) bool {
		g, ok := m.(*ghostfile.GhostFileEntry)
		if ok {
			g.Mode = &mode
		}
		return ok
	}
}
