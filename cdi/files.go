// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// ErrFiles reports that this node lacks the like of a driver file that a checkpoint has mounted.
var ErrFiles = errors.New("the driver's files do not fit the checkpoint")

// File is a file of the driver or its tools: its paths on this node and in containers.
type File struct{ Host, Container string }

var (
	// versionForm is a driver's version in the path of a library or of its firmware:
	// libcuda.so.580.159.04, nvidia/580.159.04/gsp_ga10x.bin.
	versionForm = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`(\.so\.|/nvidia/)([0-9]{3,}\.[0-9]+(?:\.[0-9]+)?)(/|$)`)
	})
	// driverForm matches the names of the driver's files and tools.
	driverForm = sync.OnceValue(func() *regexp.Regexp {
		return regexp.MustCompile(`^(lib(cuda|cudadebugger|nvcuvid|nvoptix)\.so(\..*)?|.*nvidia.*|gsp_.*\.bin)$`)
	})
	// socketForm matches the sockets of the driver's daemons.
	socketForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`/nvidia-[a-z]+/socket$`) })
)

// DriverVersion returns the driver's version in a file's name; empty if there is none.
func DriverVersion(file string) string {
	if m := versionForm().FindStringSubmatch(path.Clean(file)); m != nil {
		return m[2]
	}
	return ""
}

// IsDriverFile reports whether a file has the name of one of NVIDIA's driver.
func IsDriverFile(file string) bool {
	return DriverVersion(file) != "" || driverForm().MatchString(path.Base(file)) || socketForm().MatchString(path.Clean(file))
}

// likeness returns what a file has in common with its like of another version or distribution.
func likeness(file string) string {
	file = path.Clean(file)
	if m := versionForm().FindStringSubmatchIndex(file); m != nil {
		file = file[:m[4]] + "*" + file[m[5]:]
		if file[m[2]:m[3]] == "/nvidia/" {
			return path.Join(path.Base(path.Dir(file)), path.Base(file))
		}
	}
	return strings.TrimPrefix(cmp.Or(socketForm().FindString(file), path.Base(file)), "/")
}

// counterpart returns the file that takes the place of another: one at the same path, else of the
// same name, else of a name that differs in the version only.
func counterpart(file string, files []File) (File, bool) {
	for _, same := range []func(File) bool{
		func(f File) bool { return f.Container == file },
		func(f File) bool {
			return path.Base(f.Container) == path.Base(file) && likeness(f.Container) == likeness(file)
		},
		func(f File) bool { return likeness(f.Container) == likeness(file) },
	} {
		if i := slices.IndexFunc(files, same); i >= 0 {
			return files[i], true
		}
	}
	return File{}, false
}

// Substitution is a file of the driver that Rebind has mounted.
type Substitution struct {
	Path string // in the container
	Host string // the file that is mounted there now
}

// Rebind makes a spec fit the mounts of a dump: runc and CRIU need a mount at each path at which
// the container had one, and know nothing of versions.
//
//   - A mount of a driver file whose source this node lacks gets the counterpart as its source.
//   - A driver file that only the dump has mounted is mounted: the counterpart among the spec's own
//     mounts or, if the spec grants a GPU, among files, which are this node's (Registry.Files).
//   - A device node that only the dump has mounted gets /dev/null. Its path is in stray: the caller
//     must remove it after the restore. A device at that path leaves the spec, for which runc would
//     have CRIU mount this machine's node, whatever its numbers.
//
// Of files that the dump's processes have open or mapped, Rebind refuses a counterpart of another
// version: a process cannot change its library.
//
// The error is ErrFiles. The spec is then of no use.
func Rebind(spec *specs.Spec, mounted, mapped []string, files []File) (substituted []Substitution, stray []string, err error) {
	// A dump is not to choose files of this node for a container that has no business with them.
	request := Read(spec)
	granted := len(request.Minors) > 0 || request.AllNodes
	if !granted {
		files = nil
	}
	files = slices.Concat(specFiles(spec), files)
	var lost []string
	for i, m := range spec.Mounts {
		if !IsBind(m) || IsNode(m.Destination) || !IsDriverFile(m.Destination) || exists(m.Source) {
			continue
		}
		f, ok := counterpart(path.Clean(m.Destination), files)
		if !ok {
			lost = append(lost, m.Source)
			continue
		}
		spec.Mounts[i].Source = f.Host
		substituted = append(substituted, Substitution{path.Clean(m.Destination), f.Host})
	}
	for _, at := range mounted {
		at = path.Clean(at)
		if !path.IsAbs(at) || // not as runc writes it
			slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool { return path.Clean(m.Destination) == at }) {
			continue
		}
		switch f, ok := counterpart(at, files); {
		case IsNode(at):
			spec.Mounts = append(spec.Mounts, bind("/dev/null", at))
			stray = append(stray, at)
			if spec.Linux != nil {
				spec.Linux.Devices = slices.DeleteFunc(spec.Linux.Devices, func(d specs.LinuxDevice) bool { return path.Clean(d.Path) == at })
			}
		case !IsDriverFile(at): // the user's; runc and CRIU say what is wrong
		case !ok:
			lost = append(lost, at)
		default:
			spec.Mounts = append(spec.Mounts, bind(f.Host, at))
			substituted = append(substituted, Substitution{at, f.Host})
		}
	}
	if len(lost) > 0 && !granted {
		return nil, nil, fmt.Errorf("%w: it had %s mounted, and the container's spec grants no GPU", ErrFiles, strings.Join(slices.Compact(slices.Sorted(slices.Values(lost))), ", "))
	}
	if len(lost) > 0 {
		slices.Sort(lost)
		return nil, nil, fmt.Errorf("%w: it had %s mounted, and neither the container's spec nor a CDI specification of this node has their like; `gpuckpt cdi generate`, or nvidia-ctk, writes one",
			ErrFiles, strings.Join(slices.Compact(lost), ", "))
	}
	return substituted, stray, sameVersion(substituted, mapped)
}

// sameVersion refuses another version of a library that a process has loaded.
func sameVersion(substituted []Substitution, mapped []string) error {
	for _, r := range substituted {
		was, is := DriverVersion(r.Path), DriverVersion(r.Host)
		if real, err := filepath.EvalSymlinks(r.Host); err == nil && is == "" {
			is = DriverVersion(real)
		}
		if was != "" && is != "" && was != is && slices.Contains(mapped, r.Path) {
			return fmt.Errorf("%w: a process has loaded %s of NVIDIA driver %s, and this node has %s: restore it where the driver is the same", ErrFiles, r.Path, was, is)
		}
	}
	return nil
}

func specFiles(spec *specs.Spec) []File {
	var files []File
	for _, m := range spec.Mounts {
		if IsBind(m) && IsDriverFile(m.Destination) && !IsNode(m.Destination) && exists(m.Source) {
			files = append(files, File{Host: m.Source, Container: path.Clean(m.Destination)})
		}
	}
	return files
}

// bind returns a mount of a driver file with the options of NVIDIA's own CDI specifications, but for
// rprivate: the dump has the mode that its host gave it.
func bind(host, at string) specs.Mount {
	return specs.Mount{Destination: at, Source: host, Type: "bind", Options: []string{"rbind", "ro", "nosuid", "nodev"}}
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

func clone(spec *specs.Spec) (*specs.Spec, error) {
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, fmt.Errorf("copy the spec: %w", err)
	}
	c := new(specs.Spec)
	if err := json.Unmarshal(data, c); err != nil {
		return nil, fmt.Errorf("copy the spec: %w", err)
	}
	return c, nil
}
