// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/containerd/cgroups/v3/cgroup2"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/internal/host"
)

// runcRoot is where runc keeps its containers' state when its options do not
// say otherwise (containerd, pkg/process.RuncRoot).
const runcRoot = "/run/containerd/runc"

// runcState is where runc keeps the container's state.
func (c *container) runcState() string {
	return filepath.Join(cmp.Or(c.runcRoot, runcRoot), c.namespace, c.id)
}

// setDevice lets a running container use a character device, or no longer. runc
// does not undo it with an update of resources, which leaves devices alone.
// What is open stays so.
//
// cgroup v1 keeps a list of rules. With v2 the rules are a program that allows or
// not, and of several each must allow: so it is replaced by one of runc's rules,
// which its state has, and those set here.
func (c *container) setDevice(device deviceNode, allow bool) error {
	rule := specs.LinuxDeviceCgroup{Allow: allow, Type: "c", Major: &device.major, Minor: &device.minor, Access: "rwm"}
	doing := fmt.Sprintf("change access to device %d:%d", device.major, device.minor)
	cg, err := host.CgroupOf(c.pid)
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if !cg.Unified() {
		if err := writeDeviceRule(c.pid, rule); err != nil {
			return fmt.Errorf("%s: %w", doing, err)
		}
		return nil
	}
	rules, err := runcDeviceRules(filepath.Join(c.runcState(), "state.json"))
	if err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	changed := append(c.deviceRules[:len(c.deviceRules):len(c.deviceRules)], rule)
	if err := replaceDeviceProgram(cg.Dir(), append(rules, changed...)); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	c.deviceRules = changed
	return nil
}

// writeDeviceRule adds a rule to the cgroup v1 of a process.
func writeDeviceRule(pid int, rule specs.LinuxDeviceCgroup) error {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(data)) {
		// hierarchy-ID:controller-list:cgroup-path, cgroups(7)
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) != 3 || parts[1] != "devices" {
			continue
		}
		file := "devices.deny"
		if rule.Allow {
			file = "devices.allow"
		}
		f, err := os.OpenFile(filepath.Join("/sys/fs/cgroup/devices", parts[2], file), os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(f, "%s %d:%d %s", rule.Type, *rule.Major, *rule.Minor, rule.Access)
		return errors.Join(err, f.Close())
	}
	return errors.New("the container has no cgroup for devices")
}

// runcState is what of runc's state.json counts here. Types are characters'
// codes and -1 is every number (opencontainers/cgroups/devices/config).
type runcState struct {
	Config struct {
		Cgroups struct {
			Devices []struct {
				Type        rune   `json:"type"`
				Major       int64  `json:"major"`
				Minor       int64  `json:"minor"`
				Permissions string `json:"permissions"`
				Allow       bool   `json:"allow"`
			} `json:"devices"`
		} `json:"cgroups"`
	} `json:"config"`
}

// runcDeviceRules reads the rules that runc has set for a container, its own
// for /dev/null and the like among them; the last that fits a device decides.
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
		rules = append(rules, specs.LinuxDeviceCgroup{Allow: d.Allow, Type: string(d.Type), Major: &d.Major, Minor: &d.Minor, Access: d.Permissions})
	}
	return rules, nil
}

// replaceDeviceProgram makes rules those of a cgroup v2. On an error they are as
// they were, unless several programs were attached and not all could be
// detached: what is left allows no more than either.
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
	// Until those before are gone both must allow: at no time is more allowed
	// than before and after.
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
