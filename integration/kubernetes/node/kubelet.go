// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// startLimit bounds the start of the kubelet, endLimit each step of its end.
const (
	startLimit = 2 * time.Minute
	endLimit   = time.Minute
)

// Name is the node's name, which pods must give: there is no scheduler. JoinedName is that of a node
// that joins it.
const (
	Name       = "gpuckpt-node"
	JoinedName = "gpuckpt-node-2"
)

// kubeletPort is where a kubelet answers, at an address that is its node's alone.
const kubeletPort = "10250"

// kubeletUser is the kubelet towards the API server and its clients.
func (n *Node) kubeletUser() string { return "kubelet-" + n.Name() }

// kubelet is one running kubelet.
type kubelet struct {
	*process
	address string
	client  *http.Client
}

// The directories of the kubelet: its root, what it sees below /var/lib and /var/log,
// and the files that it takes for the kernel's settings.
func (n *Node) kubeletRoot() string {
	if n.opts.Machine {
		return "/var/lib/kubelet"
	}
	return filepath.Join(n.Dir(), "kubelet")
}
func (n *Node) podDir() string   { return filepath.Join(n.Dir(), "pods") }
func (n *Node) varLib() string   { return filepath.Join(n.Dir(), "l") } // short: it has sockets
func (n *Node) varLog() string   { return filepath.Join(n.Dir(), "kubelet-logs") }
func (n *Node) settings() string { return filepath.Join(n.Dir(), "sysctl") }

// ownPaths gives the program that follows directories of its own at /var/lib and
// /var/log, and files in the place of some of the kernel's settings. What it mounts
// elsewhere it mounts for all. The mounts that hold these are made private first, so
// that the others' stay as they are.
const ownPaths = `
for dir in / /var /var/lib /var/log /proc /proc/sys; do mount --make-private "$dir" 2>/dev/null || :; done
mount --bind "$1" /var/lib
mount --bind "$2" /var/log
for file in "$3"/*; do mount --bind "$file" "/proc/sys/$(basename "$file" | tr . /)"; done
shift 3
exec "$@"`

// kubeletConfig is the kubelet's configuration, less what follows it.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
readOnlyPort: 0
healthzPort: 0
cgroupDriver: cgroupfs
failCgroupV1: false
failSwapOn: false
enforceNodeAllocatable: []
evictionHard: {memory.available: 1Mi, nodefs.available: 1Mi, imagefs.available: 1Mi}
imageGCHighThresholdPercent: 100
localStorageCapacityIsolation: false
makeIPTablesUtilChains: false
containerLogMaxSize: 10Mi
crashLoopBackOff: {maxContainerRestartPeriod: 1s}
fileCheckFrequency: 1s
syncFrequency: 2s
`

// startKubelet starts the kubelet and returns when it says that it is healthy.
func (n *Node) startKubelet(ctx context.Context) (*kubelet, error) {
	root := n.kubeletRoot()
	for _, dir := range []string{n.InMachine(root), n.podDir(), n.varLib(), n.varLog()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("start the kubelet: %w", err)
		}
	}
	if err := copySettings(n.settings()); err != nil {
		return nil, fmt.Errorf("start the kubelet: %w", err)
	}
	k := &kubelet{address: net.JoinHostPort(n.network.gateway, kubeletPort)}
	var err error
	if k.client, err = n.authority.client(adminUser); err != nil {
		return nil, err
	}
	if err := n.authority.issue(n.kubeletUser(), "system:node:"+n.Name(), []string{"system:nodes"}, n.network.gateway); err != nil {
		return nil, err
	}
	if !n.opts.Machine {
		// What the kubelet mounts into pods must be seen by containerd.
		if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
			return nil, fmt.Errorf("start the kubelet: mount %s: %w", root, err)
		}
		if err := unix.Mount("", root, "", unix.MS_SHARED, ""); err != nil {
			return nil, fmt.Errorf("start the kubelet: share %s: %w", root, err)
		}
	}
	cmd, err := n.kubeletCommand()
	if err != nil {
		return nil, fmt.Errorf("start the kubelet: %w", err)
	}
	if k.process, err = n.startCommand("kubelet", cmd); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		if _, err := k.call(ctx, http.MethodGet, "/healthz"); err == nil {
			return k, nil
		}
		if err := k.pause(ctx, 50*time.Millisecond); err != nil {
			k.stop()
			return nil, fmt.Errorf("wait for the kubelet: %w", err)
		}
	}
}

// kubeletCommand writes the kubelet's configuration and gives its command.
func (n *Node) kubeletCommand() (*exec.Cmd, error) {
	if err := os.WriteFile(filepath.Join(n.Dir(), "resolv.conf"), []byte("nameserver 127.0.0.1\n"), 0o644); err != nil {
		return nil, err
	}
	mode := "AlwaysAllow"
	if n.opts.KubeletAsks {
		mode = "Webhook"
	}
	config := kubeletConfig + fmt.Sprintf(`address: %s
port: %s
authentication: {anonymous: {enabled: false}, webhook: {enabled: %t}, x509: {clientCAFile: %s}}
authorization: {mode: %s}
tlsCertFile: %s
tlsPrivateKeyFile: %s
cgroupRoot: /%s
containerRuntimeEndpoint: unix://%s
podLogsDir: %s
resolvConf: %s
staticPodPath: %s
volumePluginDir: %s
%s`, n.network.gateway, kubeletPort, n.opts.KubeletAsks, n.authority.path("ca"), mode, n.authority.path(n.kubeletUser()), n.authority.keyPath(n.kubeletUser()),
		n.Cgroup(), n.Address(), filepath.Join(n.Dir(), "pod-logs"), filepath.Join(n.Dir(), "resolv.conf"), n.podDir(),
		filepath.Join(n.Dir(), "plugins"), n.opts.KubeletConfig)
	file := filepath.Join(n.Dir(), "kubelet.yaml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		return nil, err
	}
	args := []string{
		"--config", file, "--root-dir", n.kubeletRoot(), "--cert-dir", filepath.Join(n.Dir(), "pki"),
		"--hostname-override", n.Name(), "--node-ip", n.network.gateway, "--v=2",
		"--containerd", n.Address(), // else cAdvisor asks the machine's
	}
	if n.api != nil {
		kubeconfig, err := n.writeKubeconfig(n.kubeletUser())
		if err != nil {
			return nil, err
		}
		args = append(args, "--kubeconfig", kubeconfig)
	}
	own, err := n.Command(context.Background(), "kubelet", args...)
	if err != nil {
		return nil, err
	}
	if n.opts.Machine {
		return n.machineKubelet(own), nil
	}
	cmd := exec.Command("unshare", append([]string{"--mount", "--propagation", "unchanged", "sh", "-ec", ownPaths, "sh", n.varLib(), n.varLog(), n.settings()}, own.Args...)...)
	cmd.Dir, cmd.Env, cmd.SysProcAttr = own.Dir, own.Env, own.SysProcAttr
	return cmd, nil
}

// RestartKubelet ends the kubelet and starts it again. Pods live on.
func (n *Node) RestartKubelet(ctx context.Context) (err error) {
	n.kubelet.stop()
	n.kubelet, err = n.startKubelet(ctx)
	return err
}

// KubeletURL is where the kubelet answers.
func (n *Node) KubeletURL() string { return "https://" + n.kubelet.address }

// StatusError is an answer of the kubelet's that is no success.
type StatusError struct {
	Code int
	Body string
}

// Error gives the code and the kubelet's words.
func (e *StatusError) Error() string { return fmt.Sprintf("status %d: %s", e.Code, e.Body) }

// call makes a request of the kubelet's API and gives the answer's body. An answer
// other than 200 is a *StatusError.
func (k *kubelet) call(ctx context.Context, method, path string) ([]byte, error) {
	request, err := http.NewRequestWithContext(ctx, method, "https://"+k.address+path, nil)
	if err != nil {
		return nil, err
	}
	response, err := k.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, path, err)
	}
	if response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s %s: %w", method, path, &StatusError{response.StatusCode, string(body)})
	}
	return body, nil
}
