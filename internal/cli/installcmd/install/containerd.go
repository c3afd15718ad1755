// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pelletier/go-toml/v2"
)

const (
	defaultConfig = "/etc/containerd/config.toml"
	// handler is the name of the runtime in containerd's configuration, which a RuntimeClass names.
	handler = "gpuckpt"
	// searchPath is where a node's programs are.
	searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	// commandLimit bounds each program that is run.
	commandLimit = 2 * time.Minute
)

// criuLink is where containerd's CRI plugin finds the release's CRIU. It refuses each checkpoint while its
// $PATH has no criu of version 3.16 or newer, whichever the shim uses (CheckForCriu in its cri/server).
const criuLink = "/usr/local/bin/criu"

// distributions are Kubernetes distributions that generate containerd's configuration: where it is.
var distributions = []string{"/var/lib/rancher/k3s/agent/etc/containerd", "/var/lib/rancher/rke2/agent/etc/containerd"}

// criPlugin is the table of the CRI plugin in each version of the configuration.
var criPlugin = map[int]string{2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}

// dropIn is a configuration of the runtime. It keeps runc's name, so that CRI sends it runc's
// options; only the program differs.
func (o Options) dropIn(version int, systemdCgroup bool) string {
	table := fmt.Sprintf("plugins.'%s'.containerd.runtimes.%s", criPlugin[version], handler)
	return fmt.Sprintf(`[%s]
  runtime_type = "io.containerd.runc.v2"
  runtime_path = %q
  pod_annotations = ["dev.gpuckpt.*"]
  container_annotations = ["dev.gpuckpt.*"]

[%s.options]
  SystemdCgroup = %v
`, table, o.shim(), table, systemdCgroup)
}

func (o Options) shim() string { return filepath.Join(o.Prefix, "bin", ShimName) }

// settings are the part of containerd's configuration that is read.
type settings struct {
	Version int      `toml:"version"`
	Imports []string `toml:"imports"`
	Plugins map[string]struct {
		Containerd struct {
			Default  string `toml:"default_runtime_name"`
			Runtimes map[string]struct {
				Path    string `toml:"runtime_path"`
				Options struct {
					SystemdCgroup bool `toml:"SystemdCgroup"`
				} `toml:"options"`
			} `toml:"runtimes"`
		} `toml:"containerd"`
	} `toml:"plugins"`
}

// systemdCgroup reports whether containerd's default runtime has systemd make cgroups.
func (s settings) systemdCgroup() bool {
	for _, plugin := range criPlugin {
		cri := s.Plugins[plugin].Containerd
		if cri.Runtimes[cmp.Or(cri.Default, "runc")].Options.SystemdCgroup {
			return true
		}
	}
	return false
}

// configure makes containerd know the runtime, and returns the file that does.
func (o Options) configure(ctx context.Context, c *changes) (file string, err error) {
	defer wrap(&err, "configure containerd")
	config := o.Config
	if config == "" {
		for _, dir := range distributions {
			if _, err := os.Stat(o.at(dir)); err == nil {
				config = filepath.Join(dir, "config.toml")
			}
		}
	}
	config = cmp.Or(config, defaultConfig)
	if dir := filepath.Dir(config); filepath.Base(filepath.Dir(filepath.Dir(dir))) == "agent" {
		return o.generated(c, dir)
	}
	return o.plain(ctx, c, config)
}

// offerCRIU makes criuLink, unless the node has a criu, or the release none, or /usr is read-only.
func (o Options) offerCRIU(c *changes) error {
	criu := filepath.Join(o.Prefix, "lib", "gpuckpt", "criu", "criu")
	if _, err := os.Stat(o.at(criu)); err != nil {
		return nil // no CRIU is built for this architecture
	}
	now, _ := os.Readlink(o.at(criuLink))
	mine := slices.Contains(c.record.Edits, edit{Path: criuLink, Link: now})
	for _, dir := range filepath.SplitList(searchPath) {
		path := filepath.Join(dir, "criu")
		if _, err := os.Lstat(o.at(path)); err == nil && (path != criuLink || !mine) {
			return nil
		}
	}
	if err := c.link(criuLink, criu); !errors.Is(err, syscall.EROFS) {
		return err
	}
	return nil
}

// generated configures the containerd of k3s or RKE2, which writes its configuration at each start
// from a template, and from 2026 on imports a directory.
func (o Options) generated(c *changes, dir string) (file string, err error) {
	data, err := os.ReadFile(o.at(filepath.Join(dir, "config.toml")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	now := settings{Version: 3}
	if err := toml.Unmarshal(data, &now); err != nil {
		return "", fmt.Errorf("read %s/config.toml: %w", dir, err)
	}
	base := "config.toml"
	if now.Version >= 3 {
		base = "config-v3.toml"
	}
	block := o.dropIn(min(now.Version, 3), now.systemdCgroup())
	if imports := filepath.Join(dir, base+".d"); slices.Contains(now.Imports, filepath.Join(imports, "*.toml")) {
		file = filepath.Join(imports, "gpuckpt.toml")
		return file, c.write(file, header+fmt.Sprintf("version = %d\n\n", now.Version)+block)
	}
	file = filepath.Join(dir, base+".tmpl")
	template, err := os.ReadFile(o.at(file))
	added := "\n" + header + block
	if errors.Is(err, fs.ErrNotExist) {
		return file, c.make(file, "{{ template \"base\" . }}\n", added)
	}
	if err != nil || strings.Contains(string(template), block) {
		return file, err
	}
	for i, e := range c.record.Edits {
		if e.Path == file && e.Added != "" && strings.Contains(string(template), e.Added) { // of another version
			c.record.Edits[i].Added = added
			return file, c.edit(file, template, []byte(strings.Replace(string(template), e.Added, added, 1)))
		}
	}
	if strings.Contains(string(template), "runtimes."+handler+"]") {
		return "", fmt.Errorf("%s has a runtime %s already: remove it, and run this again", file, handler)
	}
	return file, c.insert(file, len(template), added)
}

const header = "# Written by gpuckpt install; gpuckpt uninstall removes it.\n"

// plain configures a containerd that reads its configuration as it is. It takes the first form with
// which containerd's own dump shows the runtime and all else as before: containerd 2.2 drops what a
// file of version 2 says of CRI when an imported file is of version 3.
func (o Options) plain(ctx context.Context, c *changes, config string) (file string, err error) {
	before, _, err := o.dump(ctx, config)
	if err != nil {
		return "", err
	}
	var had settings
	if err := remarshal(before, &had); err != nil {
		return "", err
	}
	if had.Version < 3 { // containerd 2 shows any file as one of version 3
		return "", errors.New("containerd is too old: the runtime needs 2.2 or newer")
	}
	file = filepath.Join(filepath.Dir(config), "conf.d", "gpuckpt.toml")
	// Of a pattern there may be no file: without one that an import names containerd does not start.
	pattern := strings.TrimSuffix(file, ".toml") + "*.toml"
	var why error
	for _, imported := range []bool{true, false} { // already, or to be
		for _, version := range []int{3, 2} {
			why = c.write(file, header+fmt.Sprintf("version = %d\n\n", version)+o.dropIn(version, had.systemdCgroup()))
			if why == nil && !imported {
				why = o.addImport(c, config, pattern)
			}
			if why == nil {
				why = o.means(ctx, config, before)
			}
			if why == nil {
				return file, nil
			}
			if err := c.rollback(); err != nil {
				return "", errors.Join(why, err)
			}
		}
	}
	return "", fmt.Errorf("%s stays as it was: %w", config, why)
}

// means reports why containerd's configuration is not what it was, with the runtime.
func (o Options) means(ctx context.Context, config string, before map[string]any) error {
	after, said, err := o.dump(ctx, config)
	if err != nil {
		return err
	}
	var has settings
	if err := remarshal(after, &has); err != nil {
		return err
	}
	found := ""
	for _, plugin := range criPlugin {
		found = cmp.Or(found, has.Plugins[plugin].Containerd.Runtimes[handler].Path)
	}
	if found != o.shim() {
		return fmt.Errorf("containerd does not read the runtime (its runtime_path is %q): %s", found, said)
	}
	for _, each := range []map[string]any{before, after} {
		delete(each, "imports")
		for _, plugin := range criPlugin {
			delete(table(each, "plugins", plugin, "containerd", "runtimes"), handler)
		}
	}
	if !reflect.DeepEqual(before, after) {
		return errors.New("containerd would lose settings that it has")
	}
	return nil
}

// table returns a table within a table, nil if there is none.
func table(in map[string]any, keys ...string) map[string]any {
	for _, key := range keys {
		in, _ = in[key].(map[string]any)
	}
	return in
}

var (
	importsForm = regexp.MustCompile(`(?m)^[ \t]*imports[ \t]*=[ \t]*\[`)
	tableForm   = regexp.MustCompile(`(?m)^[ \t]*\[`)
)

// addImport adds a file to the imports of containerd's configuration, without a change of anything
// else in it. It makes a configuration where there is none.
func (o Options) addImport(c *changes, config, file string) error {
	data, err := os.ReadFile(o.at(config))
	if errors.Is(err, fs.ErrNotExist) { // containerd then has its defaults, and imports nothing
		return c.make(config, header+"version = 3\n", fmt.Sprintf("imports = [%q]\n", file))
	}
	if err != nil {
		return err
	}
	root := len(data) // where the tables begin
	if at := tableForm.FindIndex(data); at != nil {
		root = at[0]
	}
	if at := importsForm.FindIndex(data[:root]); at != nil {
		comma := ", "
		if rest := bytes.TrimLeft(data[at[1]:], " \t\r\n"); bytes.HasPrefix(rest, []byte("]")) {
			comma = ""
		}
		return c.insert(config, at[1], fmt.Sprintf("%q%s", file, comma))
	}
	return c.insert(config, root, fmt.Sprintf("imports = [%q] # by gpuckpt install\n", file))
}

// dump has containerd print its configuration, and returns it with what containerd says.
func (o Options) dump(ctx context.Context, config string) (all map[string]any, said string, err error) {
	out, said, err := o.run(ctx, cmp.Or(o.Containerd, "containerd"), "--config", config, "config", "dump")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, said, fmt.Errorf("%w: install containerd, name it with --containerd, or leave its configuration alone with --without-containerd", err)
	}
	if err != nil {
		return nil, said, err
	}
	if err := toml.Unmarshal(out, &all); err != nil {
		return nil, said, fmt.Errorf("read containerd's configuration: %w", err)
	}
	return all, said, nil
}

// remarshal reads a part of a configuration.
func remarshal(all map[string]any, part *settings) error {
	data, err := toml.Marshal(all)
	if err == nil {
		err = toml.Unmarshal(data, part)
	}
	return err
}

// restart restarts containerd, such that containers live on.
func (o Options) restart(ctx context.Context) (err error) {
	defer wrap(&err, "restart containerd")
	if o.RestartCommand != "" {
		_, _, err := o.run(ctx, "/bin/sh", "-c", o.RestartCommand)
		return err
	}
	for _, unit := range []string{"k3s", "k3s-agent", "rke2-server", "rke2-agent", "containerd"} {
		if _, _, err := o.run(ctx, "systemctl", "is-active", "--quiet", unit); err != nil {
			continue
		}
		out, _, err := o.run(ctx, "systemctl", "show", "--property=KillMode", "--value", unit)
		if err != nil {
			return err
		}
		if mode := strings.TrimSpace(string(out)); mode != "process" && mode != "none" {
			return fmt.Errorf("the unit %s has KillMode=%s, with which a restart ends all containers: set KillMode=process, or restart it by hand", unit, mode)
		}
		_, _, err = o.run(ctx, "systemctl", "restart", unit)
		return err
	}
	return errors.New("no unit of systemd runs it: give --restart-command, or restart it by hand")
}

// run runs a program of the node, in the node's root.
func (o Options) run(ctx context.Context, program string, args ...string) (stdout []byte, stderr string, err error) {
	ctx, cancel := context.WithTimeout(ctx, commandLimit)
	defer cancel()
	if !strings.Contains(program, "/") {
		for _, dir := range filepath.SplitList(searchPath) {
			if _, err := os.Lstat(o.at(filepath.Join(dir, program))); err == nil { // a link leads on in the node's root
				program = filepath.Join(dir, program)
				break
			}
		}
		if !strings.Contains(program, "/") {
			return nil, "", fmt.Errorf("no program %s in %s: %w", program, searchPath, fs.ErrNotExist)
		}
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Env = append(os.Environ(), "PATH="+searchPath, "SYSTEMD_IGNORE_CHROOT=1")
	cmd.Dir = "/"
	if o.Root != "/" {
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: o.Root}
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		return nil, errs.String(), fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, bytes.TrimSpace(errs.Bytes()))
	}
	return out.Bytes(), errs.String(), nil
}
