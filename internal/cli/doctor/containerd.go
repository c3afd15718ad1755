// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/client"
	"github.com/pelletier/go-toml/v2"
	"golang.org/x/mod/semver"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// containerdOldest is the oldest containerd that is tested. Those before 2.0 know no shim of version 3.
const containerdOldest = "v2.2"

// containerdConfig is the part of containerd's configuration that is checked.
type containerdConfig struct {
	Root            string   `toml:"root"`
	DisabledPlugins []string `toml:"disabled_plugins"`
	Plugins         struct {
		Version3 *criConfig `toml:"io.containerd.cri.v1.runtime"`
		Version2 *criConfig `toml:"io.containerd.grpc.v1.cri"`
	} `toml:"plugins"`
}

type criConfig struct {
	CDI        *bool    `toml:"enable_cdi"`
	CDIDirs    []string `toml:"cdi_spec_dirs"`
	Containerd struct {
		Runtimes map[string]struct {
			Kind           string   `toml:"runtime_type"`
			Path           string   `toml:"runtime_path"`
			PodAnnotations []string `toml:"pod_annotations"`
		} `toml:"runtimes"`
	} `toml:"containerd"`
}

// CheckContainerd looks at a containerd, through its socket, and at its configuration. It returns
// the directories of its CDI specifications, nil for the usual ones, and of its content. err is why
// there is no daemon.
func CheckContainerd(ctx context.Context, n *Node, address string, err error) (checks []Check, cdiDirs []string, root string) {
	a := area{name: "containerd"}
	d := n.Containerd
	var number string
	if err != nil {
		err = fmt.Errorf("none at %s: %w", address, err)
	} else {
		number, err = d.version(ctx)
	}
	if err != nil {
		if errors.Is(err, fs.ErrPermission) {
			return a.with(Failure, "daemon", err.Error(), "nothing is known of it", "# run gpuckpt doctor as root"), nil, ""
		}
		return a.with(Failure, "daemon", err.Error(), "no container can run", "systemctl enable --now containerd  # or name its socket: gpuckpt doctor --address SOCKET"), nil, ""
	}
	found := fmt.Sprintf("%s at %s (pid %d)", number, d.Address, d.PID)
	a.either(!tooOld(number), "daemon", found,
		Failure, found, "too old: gpuckpt's runtime needs containerd "+containerdOldest[1:]+" or newer", "# see https://github.com/containerd/containerd/releases")
	out, stderr, err := n.Run(ctx, d.Program, "--config", d.Config, "config", "dump")
	var config containerdConfig
	if err == nil {
		err = toml.Unmarshal([]byte(out), &config)
	}
	if err != nil {
		return a.with(Warning, "configuration", d.Config+": "+firstLine(stderr, err), "what it holds is not known", "containerd --config "+d.Config+" config dump"), nil, ""
	}
	cri := cmp.Or(config.Plugins.Version3, config.Plugins.Version2, new(criConfig))
	a.checkCRI(n, config.DisabledPlugins, cri)
	return a.checks, cri.CDIDirs, config.Root
}

// tooOld reports whether a containerd is, as far as its number says: Debian's is 1.7.24~ds1.
func tooOld(number string) bool {
	is := semver.MajorMinor("v" + regexp.MustCompile(`^[\d.]*`).FindString(number))
	return is != "" && semver.Compare(is, containerdOldest) < 0
}

// version asks the daemon for its version, without "v".
func (d *Daemon) version(ctx context.Context) (string, error) {
	c, err := client.New(d.Address, client.WithTimeout(dialTimeout))
	if err != nil {
		return "", err
	}
	defer c.Close()
	version, err := c.Version(ctx)
	return strings.TrimPrefix(version.Version, "v"), err
}

// checkCRI looks at the runtimes that the kubelet can use.
func (a *area) checkCRI(n *Node, disabled []string, cri *criConfig) {
	if slices.ContainsFunc([]string{"io.containerd.grpc.v1.cri", "cri", "io.containerd.cri.v1.runtime"}, func(name string) bool { return slices.Contains(disabled, name) }) {
		a.ok("CRI", "off: no Kubernetes here; other clients name the runtime themselves")
		return
	}
	// A file of its own, read after gpuckpt.toml, which may have the rest of the runtime.
	add := func(name, table string, lines ...string) string {
		return fmt.Sprintf("mkdir -p /etc/containerd/conf.d && cat >/etc/containerd/conf.d/zz-%s.toml <<'END' && systemctl restart containerd\nversion = 3\n[plugins.'io.containerd.cri.v1.runtime'%s]\n%s\nEND\n# %s must import conf.d/*.toml", name, table, strings.Join(lines, "\n"), n.Containerd.Config)
	}
	const notes = "pod_annotations = ['dev.gpuckpt.*']"
	shim, _ := n.Look(ShimName) // CheckPrograms says so if there is none
	ours := 0
	for _, name := range slices.Sorted(maps.Keys(cri.Containerd.Runtimes)) {
		r := cri.Containerd.Runtimes[name]
		if r.Kind != "io.containerd.gpuckpt.v2" && !isShim(r.Path) {
			continue
		}
		ours++
		switch {
		case r.Kind != "io.containerd.runc.v2":
			a.add(Warning, "CRI runtime "+name, "runtime_type "+r.Kind, "containerd keeps runc's options, SystemdCgroup among them, from a runtime of another name",
				add(name, ".containerd.runtimes."+name, "runtime_type = 'io.containerd.runc.v2'", "runtime_path = '"+cmp.Or(r.Path, shim)+"'", notes))
		case !passes(r.PodAnnotations):
			a.add(Warning, "CRI runtime "+name, "annotations dev.gpuckpt.* are not passed on", "pods cannot set options of their own",
				add(name, ".containerd.runtimes."+name, notes))
		default:
			a.ok("CRI runtime "+name, "%s", r.Path)
		}
	}
	if ours == 0 {
		fix := "gpuckpt install --restart"
		if n.Containerd.Config != defaultConfig {
			fix += " --containerd-config " + n.Containerd.Config
		}
		a.add(Warning, "CRI", "no runtime of the CRI plugin is gpuckpt's", "pods cannot use it", fix)
	}
	if cri.CDI != nil && !*cri.CDI {
		a.add(Warning, "CDI in CRI", "enable_cdi = false", "device plugins that name CDI devices give containers no GPU", add("cdi", "", "enable_cdi = true"))
	}
}

// passes reports whether patterns let gpuckpt's annotations through, as containerd's CRI does.
func passes(patterns []string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		ok, err := path.Match(p, annotations.OnCheckpoint)
		return ok && err == nil
	})
}
