// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// kernelOptions are those without which a dump fails (criu.org/Linux_kernel, `criu check`), without
// those that running containers already prove. MEMFD_CREATE is for the driver's staging areas.
var kernelOptions = []string{
	"CHECKPOINT_RESTORE", "NAMESPACES", "UTS_NS", "IPC_NS", "PID_NS", "NET_NS", "FHANDLE", "EVENTFD", "EPOLL",
	"SIGNALFD", "TIMERFD", "INOTIFY_USER", "MEMFD_CREATE",
	"UNIX_DIAG", "INET_DIAG", "INET_UDP_DIAG", "PACKET_DIAG", "NETLINK_DIAG",
}

// diagModules are the modules of options that may be modules. They are loaded on demand.
var diagModules = map[string]string{
	"UNIX_DIAG": "unix_diag", "INET_DIAG": "inet_diag", "INET_UDP_DIAG": "udp_diag", "PACKET_DIAG": "af_packet_diag", "NETLINK_DIAG": "netlink_diag",
}

// CheckKernel looks at the kernel and at the rights of this program.
func CheckKernel(n *Node) []Check {
	a := area{name: "kernel"}
	release := cmp.Or(n.read("proc/sys/kernel/osrelease"), "unknown")
	a.either(runtime.GOARCH == "amd64", "version", "Linux "+release+", x86-64", Warning, "Linux "+release+", "+runtime.GOARCH,
		"GPU state goes through CRIU on this processor: checkpoints are slower, and charged to the container's memory limit", "")
	a.rights(n)
	a.options(n, release)
	a.either(n.exists("proc/sys/kernel/ns_last_pid"), "checkpoint/restore", "available",
		Failure, "/proc/sys/kernel/ns_last_pid is missing", "this kernel was built without CONFIG_CHECKPOINT_RESTORE: CRIU cannot work",
		"# boot a kernel with CONFIG_CHECKPOINT_RESTORE=y")
	scope, found := n.read("proc/sys/kernel/yama/ptrace_scope"), "not restricted"
	if scope != "" {
		found = "kernel.yama.ptrace_scope = " + scope
	}
	a.either(scope != "3", "ptrace", found, Failure, found, "nobody may trace a process: neither CRIU nor gpuckpt can work",
		"sed -i /ptrace_scope/d /etc/sysctl.conf /etc/sysctl.d/*.conf; reboot")
	return a.checks
}

// rights checks this program's capabilities that CRIU and ptrace need, in place of the shim's.
func (a *area) rights(n *Node) {
	have, err := strconv.ParseUint(proc.Status(n.read("proc/self/status")).Field("CapEff"), 16, 64)
	names, _ := cap.FromBitmap(have)
	missing := slices.DeleteFunc([]string{"CAP_NET_ADMIN", "CAP_SYS_ADMIN", "CAP_SYS_PTRACE"}, func(name string) bool {
		return err != nil || slices.Contains(names, name) // an unknown set is not complained of
	})
	a.either(len(missing) == 0, "rights", "root's",
		Failure, "this program lacks "+strings.Join(missing, ", "), "without these most checks below cannot look at anything", "sudo gpuckpt doctor")
}

func (a *area) options(n *Node, release string) {
	config, from := n.kernelConfig(release)
	if config == nil {
		a.ok("options", "not published by this kernel (neither /proc/config.gz nor /boot/config-%s); `criu check` below shows most of them", release)
		return
	}
	var missing, modules []string
	for _, option := range kernelOptions {
		switch config[option] {
		case "y":
		case "m":
			if module := diagModules[option]; module != "" && !n.exists("sys/module", module) {
				modules = append(modules, module)
			}
		default:
			missing = append(missing, "CONFIG_"+option)
		}
	}
	a.either(len(missing) == 0, "options", fmt.Sprintf("all %d that CRIU and gpuckpt need (%s)", len(kernelOptions), from),
		Failure, strings.Join(missing, ", ")+" not set ("+from+")", "CRIU cannot dump or restore containers",
		"# boot a kernel with "+strings.Join(missing, "=y ")+"=y")
	if len(modules) > 0 && n.read("proc/sys/kernel/modules_disabled") == "1" {
		a.add(Failure, "modules", strings.Join(modules, ", ")+" not loaded, and loading is disabled", "CRIU cannot dump sockets", "echo "+strings.Join(modules, " ")+" | tr ' ' '\\n' >/etc/modules-load.d/criu.conf; reboot")
	}
	if config["TRANSPARENT_HUGEPAGE"] != "y" {
		a.add(Warning, "huge pages", "CONFIG_TRANSPARENT_HUGEPAGE is not set", "GPU state moves through small pages: checkpoints take about twice as long", "# boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE=y")
	}
}

// kernelConfig reads the kernel's build configuration, by option without CONFIG_, and returns where
// it was found; nil where it cannot be read.
func (n *Node) kernelConfig(release string) (map[string]string, string) {
	for _, path := range []string{"/proc/config.gz", "/boot/config-" + release, "/lib/modules/" + release + "/config"} {
		f, err := os.Open(n.path(path))
		if err != nil {
			continue
		}
		defer f.Close()
		var r io.Reader = f
		if strings.HasSuffix(path, ".gz") {
			if r, err = gzip.NewReader(f); err != nil {
				continue
			}
		}
		config := make(map[string]string)
		lines := bufio.NewScanner(r)
		for lines.Scan() { // "CONFIG_X=y"
			if name, value, ok := strings.Cut(lines.Text(), "="); ok && strings.HasPrefix(name, "CONFIG_") {
				config[strings.TrimPrefix(name, "CONFIG_")] = value
			}
		}
		if lines.Err() == nil {
			return config, path
		}
	}
	return nil, ""
}
