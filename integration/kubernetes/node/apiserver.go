// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// adminUser is who kubectl and the tests are, by the file of the certificate.
const adminUser = "admin"

// apiServer is a Kubernetes API server and its etcd. There is no scheduler: pods must name
// their node, unless Schedule runs. Without Options.Controllers nothing is made by itself.
type apiServer struct {
	address      string
	etcd, server *process
}

// startAPIServer starts both and returns when the server is ready.
func (n *Node) startAPIServer(ctx context.Context) (_ *apiServer, err error) {
	free, err := harness.FreePorts(3)
	if err != nil {
		return nil, fmt.Errorf("start the API server: %w", err)
	}
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", free), fmt.Sprintf("http://127.0.0.1:%d", free+1)
	host, port := "127.0.0.1", strconv.Itoa(free+2)
	if n.cluster != nil {
		host, port = serviceIP, "443"
	}
	s := &apiServer{address: net.JoinHostPort(host, port)}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	if s.etcd, err = n.start("etcd", "--data-dir", filepath.Join(n.Dir(), "etcd"), "--log-level", "warn", "--unsafe-no-fsync",
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer); err != nil {
		return nil, err
	}
	if err := n.authority.issue("apiserver", "apiserver", []string{"system:masters"}, host); err != nil {
		return nil, err
	}
	own, key := n.authority.path("apiserver"), n.authority.keyPath("apiserver")
	if s.server, err = n.start("kube-apiserver", "--etcd-servers", client, "--bind-address", host, "--secure-port", port,
		"--tls-cert-file", own, "--tls-private-key-file", key, "--client-ca-file", n.authority.path("ca"),
		"--kubelet-certificate-authority", n.authority.path("ca"), "--kubelet-client-certificate", own, "--kubelet-client-key", key,
		"--kubelet-preferred-address-types", "InternalIP",
		"--authorization-mode", "Node,RBAC", "--enable-admission-plugins", "NodeRestriction", "--anonymous-auth=false",
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key, "--service-account-signing-key-file", key,
		"--advertise-address", n.network.gateway, "--service-cluster-ip-range", "10.96.0.0/16", "--endpoint-reconciler-type", "none", "--allow-privileged",
		"--cert-dir", filepath.Join(n.Dir(), "apiserver")); err != nil {
		return nil, err
	}
	if err := s.wait(ctx, n); err != nil {
		return nil, fmt.Errorf("%w\n%s\n%s", err, s.etcd.tail(2000), s.server.tail(2000))
	}
	return s, nil
}

// wait waits until the API server is ready.
func (s *apiServer) wait(ctx context.Context, n *Node) error {
	client, err := n.authority.client(adminUser)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.address+"/readyz", nil)
		if err != nil {
			return err
		}
		if response, err := client.Do(request); err == nil {
			_ = response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return nil
			}
		}
		if err := s.server.pause(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the API server: %w", err)
		}
	}
}

// stop ends both. The server would wait a minute for those who watch something, such as agents.
func (s *apiServer) stop() {
	if s != nil {
		if s.server != nil {
			_ = s.server.cmd.Process.Kill()
		}
		s.server.stop()
		s.etcd.stop()
	}
}

// APIAddress is the API server's host and port.
func (n *Node) APIAddress() string { return n.api.address }

// writeKubeconfig writes the file with which a user of those issued reaches the API
// server, and gives its path.
func (n *Node) writeKubeconfig(user string) (string, error) {
	path := filepath.Join(n.Dir(), user+".kubeconfig")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://%s", certificate-authority: %q}}]
users: [{name: %s, user: {client-certificate: %q, client-key: %q}}]
contexts: [{name: test, context: {cluster: test, user: %s}}]
current-context: test
`, n.api.address, n.authority.path("ca"), user, n.authority.path(user), n.authority.keyPath(user), user)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		return "", fmt.Errorf("write a kubeconfig: %w", err)
	}
	return path, nil
}

// Kubectl runs kubectl on the node's API server and gives its standard output.
func (n *Node) Kubectl(ctx context.Context, args ...string) (string, error) {
	return n.Output(ctx, "kubectl", append([]string{"--kubeconfig", filepath.Join(n.Dir(), adminUser+".kubeconfig")}, args...)...)
}

// KubectlAs runs kubectl with a token, and gives its standard output.
func (n *Node) KubectlAs(ctx context.Context, token string, args ...string) (string, error) {
	return n.Output(ctx, "kubectl", append([]string{"--kubeconfig", os.DevNull, "--server", "https://" + n.api.address, "--certificate-authority", n.authority.path("ca"), "--token", token}, args...)...)
}

// Apply is "kubectl apply" of a manifest.
func (n *Node) Apply(ctx context.Context, manifest string) error {
	file := filepath.Join(n.Dir(), "manifest.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o600); err != nil {
		return fmt.Errorf("apply a manifest: %w", err)
	}
	_, err := n.Kubectl(ctx, "apply", "-f", file)
	return err
}

// KubectlEnv are variables, KEY=value each, with which a kubectl of the node's that
// is run by something else finds the API server.
func (n *Node) KubectlEnv() []string {
	return []string{"KUBECONFIG=" + filepath.Join(n.Dir(), adminUser+".kubeconfig")}
}

// establish makes what a cluster's controllers would: the node's own account, and
// the namespaces' default accounts with the certificate that pods trust.
func (n *Node) establish(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		if _, err := n.Kubectl(ctx, "get", "namespace", PodNamespace); err == nil {
			break
		}
		if err := n.api.server.pause(ctx, 100*time.Millisecond); err != nil {
			return fmt.Errorf("wait for the namespace %s: %w", PodNamespace, err)
		}
	}
	if _, err := n.Kubectl(ctx, "create", "serviceaccount", "default"); err != nil && !strings.Contains(err.Error(), "already exists") {
		return err
	}
	if _, err := n.Kubectl(ctx, "create", "configmap", "kube-root-ca.crt", "--from-file=ca.crt="+n.authority.path("ca")); err != nil {
		return err
	}
	return nil
}
