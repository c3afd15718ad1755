// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package devnode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/cgroups"
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// Access changes which devices a running container may use: the nodes in its /dev, and the rules of
// its cgroup, both of which runc's update of resources leaves alone. An open file stays open.
//
// A cgroup of version 1 has a list of rules. In version 2 the rules are a program, and of several
// each must allow a device. So the program is replaced by one made of runc's rules, which are in
// runc's state, and of those set here (docs/decisions/0011-own-device-rules.md).
type Access struct {
	// State is where runc keeps the state of the container, its state.json.
	State string

	rules []specs.LinuxDeviceCgroup // set since the container was created
}

// Grant lets a container use the character devices of this machine's paths, and makes the nodes
// there in the container. pid is a process of it. On an error it has access to none of them.
func (a *Access) Grant(pid int, paths []string) error {
	for i, path := range paths {
		err := a.grant(pid, path)
		if err == nil {
			continue
		}
		if rerr := a.Revoke(pid, paths[:i+1], nil); rerr != nil {
			err = fmt.Errorf("%w; on the way back: %w", err, rerr)
		}
		return fmt.Errorf("give the container %s: %w", path, err)
	}
	return nil
}

func (a *Access) grant(pid int, path string) error {
	d, err := numbers(path)
	if err != nil {
		return err
	}
	if err := a.set(pid, d, true); err != nil {
		return err
	}
	return inDev(pid, func(dev int) error {
		return makeNode(dev, specs.LinuxDevice{Path: path, Type: "c", Major: d.major, Minor: d.minor})
	})
}

// Revoke undoes Grant as far as it can, but for devices of keep, and returns the first error.
func (a *Access) Revoke(pid int, paths, keep []string) (first error) {
	kept := make(map[device]bool)
	for _, path := range keep {
		if d, err := numbers(path); err == nil {
			kept[d] = true
		}
	}
	for _, path := range paths {
		err := inDev(pid, func(dev int) error { return removeBeneath(dev, filepath.Base(path)) })
		first = cmp.Or(first, err)
		d, err := numbers(path)
		if errors.Is(err, os.ErrNotExist) {
			continue // and nobody can use it
		}
		if err == nil && !kept[d] {
			err = a.set(pid, d, false)
		}
		first = cmp.Or(first, err)
	}
	return first
}

func (a *Access) set(pid int, d device, allow bool) error {
	rule := specs.LinuxDeviceCgroup{Allow: allow, Type: "c", Major: &d.major, Minor: &d.minor, Access: "rwm"}
	cg, err := host.CgroupOf(pid)
	if err == nil && cg.Unified() {
		err = a.replaceProgram(cg.Dir(), rule)
	} else if err == nil {
		err = writeDeviceRule(pid, rule)
	}
	if err != nil {
		return fmt.Errorf("change access to device %d:%d: %w", d.major, d.minor, err)
	}
	return nil
}

// replaceProgram adds a rule to a cgroup v2.
func (a *Access) replaceProgram(dir string, rule specs.LinuxDeviceCgroup) error {
	rules, err := runcDeviceRules(a.State)
	if err != nil {
		return err
	}
	changed := append(slices.Clone(a.rules), rule)
	if err := replaceDeviceProgram(dir, append(rules, changed...)); err != nil {
		return err
	}
	a.rules = changed
	return nil
}

// writeDeviceRule adds a rule to the cgroup v1 of a process.
func writeDeviceRule(pid int, rule specs.LinuxDeviceCgroup) error {
	path, err := host.CgroupPath(pid, "devices")
	if err != nil {
		return err
	}
	file := "devices.deny"
	if rule.Allow {
		file = "devices.allow"
	}
	return cgroups.WriteFile(filepath.Join("/sys/fs/cgroup/devices", path), file, fmt.Sprintf("%s %d:%d %s", rule.Type, *rule.Major, *rule.Minor, rule.Access))
}

// runcState is a part of runc's state.json. A device's type is a character; -1 is every number.
type runcState struct {
	Config struct {
		Cgroups struct {
			Devices []devices.Rule `json:"devices"`
		} `json:"cgroups"`
	} `json:"config"`
}

// runcDeviceRules reads the rules that runc has set for a container, with its own for /dev/null and
// the like. The last rule that fits a device decides.
func runcDeviceRules(path string) ([]specs.LinuxDeviceCgroup, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read runc's state: %w", err)
	}
	var state runcState
	if err := json.Unmarshal(data, &state); err != nil {
		return nil, fmt.Errorf("read runc's state %s: %w", path, err)
	}
	if len(state.Config.Cgroups.Devices) == 0 {
		return nil, fmt.Errorf("runc's state %s has no rules for devices", path)
	}
	var rules []specs.LinuxDeviceCgroup
	for _, d := range state.Config.Cgroups.Devices {
		if d.Type != 'a' && d.Type != 'b' && d.Type != 'c' {
			return nil, fmt.Errorf("runc's state %s has a device of type %d", path, d.Type)
		}
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: d.Allow, Type: string(d.Type), Major: &d.Major, Minor: &d.Minor, Access: string(d.Permissions)})
	}
	return rules, nil
}

// replaceDeviceProgram sets the rules of a cgroup v2. On an error they are as before, unless not
// all of several programs could be detached: the rest allows no more than the old or the new rules.
func replaceDeviceProgram(dir string, rules []specs.LinuxDeviceCgroup) (err error) {
	instructions, license, err := cgroup2.DeviceFilter(rules)
	if err != nil {
		return err
	}
	cg, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer cg.Close()
	target := int(cg.Fd())
	before, err := link.QueryPrograms(link.QueryOptions{Target: target, Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		return fmt.Errorf("list the programs of %s: %w", dir, err)
	}
	// Until those before are gone both must allow: never is more allowed than before and after.
	detach, err := cgroup2.LoadAttachCgroupDeviceFilter(instructions, license, target)
	if err != nil {
		return err
	}
	for i, attached := range before.Programs {
		if err := detachDeviceProgram(target, attached.ID); err != nil {
			if i == 0 {
				err = errors.Join(err, detach())
			}
			return fmt.Errorf("replace the program of %s: %w", dir, err)
		}
	}
	return nil
}

func detachDeviceProgram(target int, id ebpf.ProgramID) error {
	program, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return err
	}
	defer program.Close()
	return link.RawDetachProgram(link.RawDetachProgramOptions{Target: target, Program: program, Attach: ebpf.AttachCGroupDevice})
}
