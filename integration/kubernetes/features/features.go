// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package features is the table of what pods have, and of what becomes of it in a restore. TestPods runs
// each row, and docs/kubernetes.md has the table.
package features

import (
	"fmt"
	"strings"
)

// Feature is a row of the table.
type Feature struct {
	// Pod is what a pod's spec has, as the document calls it.
	Pod string
	// After is what it is in a restored pod of such a spec; of what is refused, what to change.
	After string
	// Refused is a part of the error with which the checkpoint is refused before the dump; empty for what is
	// restored.
	Refused string
}

// The rows of the table.
const (
	Token         = "the account's token; `projected`, `downwardAPI`"
	Content       = "`configMap`, `secret`, also by `subPath`, watched (inotify) or open"
	Environment   = "`env` of these"
	EmptyDir      = "`emptyDir`, also in memory"
	Node          = "`hostPath`, `image`, `subPathExpr`"
	ReadOnly      = "`readOnly`, `recursiveReadOnly`, `readOnlyRootFilesystem`"
	Propagation   = "`mountPropagation: HostToContainer`"
	Below         = "a mount that came with a volume, below it"
	InitContainer = "`initContainers`, sidecars too; `lifecycle`"
	Probes        = "probes by exec, HTTP, TCP, gRPC"
	Users         = "`runAsUser`, `fsGroup`, `supplementalGroups`"
	Privileges    = "`capabilities`, `allowPrivilegeEscalation`, `privileged`"
	Seccomp       = "`seccompProfile`"
	Resources     = "`resources` of containers and of the pod"
	Sysctls       = "`sysctls`"
	SharedPIDs    = "`shareProcessNamespace`"
	HostsOwn      = "`hostNetwork`, `hostPID`, `hostIPC`"
	Terminal      = "`tty`, `stdin`"
	Names         = "`hostAliases`, `dnsConfig`"
	Debug         = "containers of `kubectl debug`"
	UserNamespace = "`hostUsers: false`"
)

// All is the table.
var All = []Feature{
	{Pod: Token, After: "the new pod's"},
	{Pod: Content, After: "what they hold now, and later changes"},
	{Pod: Environment, After: "as at the checkpoint"},
	{Pod: EmptyDir, After: "empty"},
	{Pod: Node, After: "the node's"},
	{Pod: ReadOnly, After: "read-only"},
	{Pod: Propagation, After: "works"},
	{Pod: Below, Refused: "it came with the mount", After: "unmount it"},
	{Pod: InitContainer, After: "run again"},
	{Pod: Probes, After: "work"},
	{Pod: Users, After: "the same"},
	{Pod: Privileges, After: "the same"},
	{Pod: Seccomp, After: "the same"},
	{Pod: Resources, After: "the new pod's"},
	{Pod: Sysctls, After: "the new pod's"},
	{Pod: SharedPIDs, After: "works, while its process ids are free"},
	{Pod: HostsOwn, After: "works, when the old pod has ended"},
	{Pod: Terminal, After: "work"},
	{Pod: Names, After: "the new pod's"},
	{Pod: Debug, After: "gone"},
	{Pod: UserNamespace, Refused: "hostUsers: false", After: "leave it out"},
}

// Table returns the table as the document has it: what becomes the same is one row.
func Table() string {
	var rows []string
	of := make(map[string][]string)
	for _, f := range All {
		after := f.After
		if f.Refused != "" {
			after = "refused, and it runs on: " + after
		}
		if of[after] == nil {
			rows = append(rows, after)
		}
		of[after] = append(of[after], f.Pod)
	}
	var b strings.Builder
	b.WriteString("| in the pod | after the restore |\n|---|---|\n")
	for _, after := range rows {
		fmt.Fprintf(&b, "| %s | %s |\n", strings.Join(of[after], "; "), after)
	}
	return b.String()
}
