// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/pelletier/go-toml/v2"
	"golang.org/x/mod/semver"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// containerdTested is the oldest containerd that this project is tested with.
const containerdTested = "v2.4"

// containerdConfig is the part of containerd's configuration that is checked.
type containerdConfig struct {
	Root            string         `toml:"root"`
	DisabledPlugins []string       `toml:"disabled_plugins"`
	Plugins         map[string]any `toml:"plugins"`
}

// criRuntime is one runtime of its CRI plugin.
type criRuntime struct {
	name, kind, path string
	pod, container   []string // annotations that are passed on
}

// CheckContainerd looks at a containerd, through its socket, and at its
// configuration. It returns the directories of containerd's CDI specifications, nil
// for the usual ones, and the directory of its content. err is why there is no daemon.
func CheckContainerd(ctx context.Context, n *Node, address string, err error) (checks []Check, cdiDirs []string, root string) {
	a := area{name: "containerd"}
	const fix = "systemctl enable --now containerd  # or name its socket: gpuckpt doctor --address SOCKET"
	if err != nil {
		a.add(Failure, "daemon", fmt.Sprintf("none at %s: %v", address, err), "no container can run", fix)
		return a.checks, nil, ""
	}
	d := n.Containerd
	c, err := client.New(d.Address, client.WithTimeout(dialTimeout))
	if err != nil {
		a.add(Failure, "daemon", err.Error(), "no container can run", fix)
		return a.checks, nil, ""
	}
	defer c.Close()
	version, err := c.Version(ctx)
	if err != nil {
		a.add(Failure, "daemon", err.Error(), "no container can run", fix)
		return a.checks, nil, ""
	}
	number := strings.TrimPrefix(version.Version, "v")
	if is := semver.MajorMinor("v" + number); is != "" && semver.Compare(is, containerdTested) < 0 {
		a.add(Warning, "daemon", fmt.Sprintf("%s at %s (pid %d)", number, d.Address, d.PID), "gpuckpt is tested with "+containerdTested[1:]+" and newer", "# see https://github.com/containerd/containerd/releases")
	} else {
		a.ok("daemon", "%s at %s (pid %d)", number, d.Address, d.PID)
	}
	out, stderr, err := n.Run(ctx, d.Program, "--config", d.Config, "config", "dump")
	var config containerdConfig
	if err == nil {
		err = toml.Unmarshal([]byte(out), &config)
	}
	if err != nil {
		a.add(Warning, "configuration", d.Config+": "+firstLine(stderr, err), "what it holds is not known", "containerd --config "+d.Config+" config dump")
		return a.checks, nil, ""
	}
	a.checkCRI(d, &config)
	return a.checks, config.cdiDirs(), config.Root
}

// checkCRI looks at the runtimes that the kubelet can use.
func (a *area) checkCRI(d *Daemon, config *containerdConfig) {
	if slices.Contains(config.DisabledPlugins, "io.containerd.grpc.v1.cri") || slices.Contains(config.DisabledPlugins, "cri") ||
		slices.Contains(config.DisabledPlugins, "io.containerd.cri.v1.runtime") {
		a.ok("CRI", "off: no Kubernetes here; other clients name the runtime themselves")
		return
	}
	add := func(lines string) string {
		return fmt.Sprintf("mkdir -p /etc/containerd/conf.d && cat >/etc/containerd/conf.d/gpuckpt.toml <<'END' && systemctl restart containerd\nversion = 3\n%s\nEND\n# %s must import conf.d/*.toml", lines, d.Config)
	}
	const table = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.%s]\n"
	var ours []criRuntime
	for _, r := range config.runtimes() {
		if r.kind == "io.containerd.gpuckpt.v2" || isShim(r.path) {
			ours = append(ours, r)
		}
	}
	if len(ours) == 0 {
		a.add(Warning, "CRI", "no runtime of the CRI plugin is gpuckpt's", "pods cannot use it", add(fmt.Sprintf(table, "gpuckpt")+
			"runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/usr/local/bin/"+ShimName+"'\npod_annotations = ['dev.gpuckpt.*']\ncontainer_annotations = ['dev.gpuckpt.*']"))
	}
	for _, r := range ours {
		switch {
		case r.kind != "io.containerd.runc.v2":
			a.add(Warning, "CRI runtime "+r.name, "runtime_type "+r.kind, "containerd keeps runc's options, SystemdCgroup among them, from a runtime of another name",
				add(fmt.Sprintf(table, r.name)+"runtime_type = 'io.containerd.runc.v2'\nruntime_path = '/usr/local/bin/"+ShimName+"'"))
		case !passes(r.pod) || !passes(r.container):
			a.add(Warning, "CRI runtime "+r.name, "annotations dev.gpuckpt.* are not passed on", "pods cannot set options of their own",
				add(fmt.Sprintf(table, r.name)+"pod_annotations = ['dev.gpuckpt.*']\ncontainer_annotations = ['dev.gpuckpt.*']"))
		default:
			a.ok("CRI runtime "+r.name, "%s", r.path)
		}
	}
	if on, set := config.cri()["enable_cdi"].(bool); set && !on {
		a.add(Warning, "CDI in CRI", "enable_cdi = false", "device plugins that name CDI devices give containers no GPU", add("[plugins.'io.containerd.cri.v1.runtime']\nenable_cdi = true"))
	}
}

// passes reports whether a list of patterns lets gpuckpt's annotations through
// (containerd, internal/cri/util: path.Match).
func passes(patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, annotations.OnCheckpoint)
		return ok && err == nil
	})
}

// cri returns the table of the CRI plugin, of configuration version 3 or 2.
func (c *containerdConfig) cri() map[string]any {
	for _, name := range []string{"io.containerd.cri.v1.runtime", "io.containerd.grpc.v1.cri"} {
		if t := table(c.Plugins, name); t != nil {
			return t
		}
	}
	return nil
}

func (c *containerdConfig) cdiDirs() (dirs []string) { return texts(c.cri()["cdi_spec_dirs"]) }

// runtimes returns the runtimes of the CRI plugin, by name.
func (c *containerdConfig) runtimes() (all []criRuntime) {
	named := table(table(c.cri(), "containerd"), "runtimes")
	for name := range named {
		t := table(named, name)
		r := criRuntime{name: name, pod: texts(t["pod_annotations"]), container: texts(t["container_annotations"])}
		r.kind, _ = t["runtime_type"].(string)
		r.path, _ = t["runtime_path"].(string)
		all = append(all, r)
	}
	slices.SortFunc(all, func(a, b criRuntime) int { return strings.Compare(a.name, b.name) })
	return all
}

// table returns the table of that name in another, nil if there is none.
func table(in map[string]any, name string) map[string]any {
	t, _ := in[name].(map[string]any)
	return t
}

// texts returns the strings of a list.
func texts(list any) (all []string) {
	values, _ := list.([]any)
	for _, v := range values {
		if s, ok := v.(string); ok {
			all = append(all, s)
		}
	}
	return all
}
