// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import "path/filepath"

// startControllers starts Kubernetes' controllers: they make the pods of DaemonSets, Deployments and
// Jobs, and each namespace's default account. The pods are bound to the node by Schedule.
func (n *Node) startControllers() (*process, error) {
	return n.start("kube-controller-manager", "--kubeconfig", filepath.Join(n.Dir(), adminUser+".kubeconfig"),
		"--leader-elect=false", "--secure-port=0", "--root-ca-file", n.authority.path("ca"),
		"--service-account-private-key-file", n.authority.keyPath("apiserver"),
		"--cert-dir", filepath.Join(n.Dir(), "controllers"))
}
