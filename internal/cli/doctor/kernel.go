// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/pkg/cap"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// CheckKernel looks at the kernel and at the rights of this program. What CRIU needs of the kernel, CRIU
// looks at itself (CheckCRIU).
func CheckKernel(n *Node) []Check {
	a := area{name: "kernel"}
	release := cmp.Or(n.read("proc/sys/kernel/osrelease"), "unknown")
	a.either(runtime.GOARCH == "amd64", "version", "Linux "+release+", x86-64", Warning, "Linux "+release+", "+runtime.GOARCH,
		"GPU state goes through CRIU on this processor: checkpoints are slower, and charged to the container's memory limit", "")
	a.rights(n)
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
