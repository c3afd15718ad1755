// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// startLimit bounds the start of the kubelet, endLimit each step of its end.
const (
	startLimit = 2 * time.Minute
	endLimit   = time.Minute
)

// nodeName is the node's name, also in the kubelet's certificate.
const nodeName = "gpuckpt-node"

// kubelet is one running kubelet.
type kubelet struct {
	address string
	client  *http.Client
	cmd     *exec.Cmd
	exited  chan struct{} // closed when it was waited for
	root    string        // a mount of its own
}

// The directories of the kubelet: its root, and what it sees below /var/lib and
// /var/log.
func (n *Node) kubeletRoot() string { return filepath.Join(n.Dir(), "kubelet") }
func (n *Node) podDir() string      { return filepath.Join(n.Dir(), "pods") }
func (n *Node) varLib() string      { return filepath.Join(n.Dir(), "l") } // short: it has sockets
func (n *Node) varLog() string      { return filepath.Join(n.Dir(), "kubelet-logs") }

// ownPaths gives the program that follows directories of its own at /var/lib and
// /var/log. What it mounts elsewhere it mounts for all. The mounts that hold the
// two are made private first, so that the machine's stay as they are.
const ownPaths = `
for dir in / /var /var/lib /var/log; do mount --make-private "$dir" 2>/dev/null || :; done
mount --bind "$1" /var/lib
mount --bind "$2" /var/log
shift 2
exec "$@"`

// kubeletConfig is the kubelet's configuration, less what follows it.
const kubeletConfig = `apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: 127.0.0.1
readOnlyPort: 0
healthzPort: 0
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
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
func (n *Node) startKubelet(ctx context.Context) (_ *kubelet, err error) {
	k := &kubelet{exited: make(chan struct{}), root: n.kubeletRoot()}
	for _, dir := range []string{k.root, n.podDir(), n.varLib(), n.varLog()} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, fmt.Errorf("start the kubelet: %w", err)
		}
	}
	port, err := freePort()
	if err != nil {
		return nil, fmt.Errorf("start the kubelet: %w", err)
	}
	k.address = net.JoinHostPort("127.0.0.1", fmt.Sprint(port))
	if err := n.writeKubeletConfig(port); err != nil {
		return nil, fmt.Errorf("start the kubelet: %w", err)
	}
	// What the kubelet mounts into pods must be seen by containerd.
	if err := syscall.Mount(k.root, k.root, "", syscall.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("start the kubelet: mount %s: %w", k.root, err)
	}
	if err := syscall.Mount("", k.root, "", syscall.MS_SHARED, ""); err != nil {
		return nil, fmt.Errorf("start the kubelet: share %s: %w", k.root, err)
	}
	if err := n.runKubelet(k); err != nil {
		return nil, err
	}
	if err := k.wait(ctx, n); err != nil {
		return nil, errors.Join(err, k.stop())
	}
	return k, nil
}

func (n *Node) writeKubeletConfig(port int) error {
	if err := os.WriteFile(filepath.Join(n.Dir(), "resolv.conf"), []byte("nameserver 127.0.0.1\n"), 0o644); err != nil {
		return err
	}
	config := kubeletConfig + fmt.Sprintf(`port: %d
cgroupRoot: /%s
containerRuntimeEndpoint: unix://%s
podLogsDir: %s
resolvConf: %s
staticPodPath: %s
volumePluginDir: %s
`, port, n.Cgroup(), n.Address(), filepath.Join(n.Dir(), "logs"), filepath.Join(n.Dir(), "resolv.conf"), n.podDir(), filepath.Join(n.Dir(), "plugins"))
	return os.WriteFile(filepath.Join(n.Dir(), "kubelet.yaml"), []byte(config), 0o600)
}

// runKubelet starts the process.
func (n *Node) runKubelet(k *kubelet) error {
	program, err := n.opts.Bins.Path("kubelet")
	if err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(n.Dir(), "kubelet.log"))
	if err != nil {
		return fmt.Errorf("start the kubelet: %w", err)
	}
	defer log.Close()
	args := []string{
		program, "--config", filepath.Join(n.Dir(), "kubelet.yaml"), "--root-dir", k.root,
		"--cert-dir", filepath.Join(n.Dir(), "pki"), "--hostname-override", nodeName, "--v=2",
	}
	// Not with a context: it must outlive the removal of pods, which Stop does.
	k.cmd = exec.Command("unshare", append([]string{"--mount", "--propagation", "unchanged", "sh", "-ec", ownPaths, "sh", n.varLib(), n.varLog()}, args...)...)
	own, err := n.Command(context.Background(), "kubelet")
	if err != nil {
		return err
	}
	k.cmd.Dir, k.cmd.Env, k.cmd.SysProcAttr = own.Dir, own.Env, own.SysProcAttr
	k.cmd.Stdout, k.cmd.Stderr = log, log
	if err := k.cmd.Start(); err != nil {
		return fmt.Errorf("start the kubelet: %w", err)
	}
	go func() {
		_ = k.cmd.Wait() // how it ended is in the log
		close(k.exited)
	}()
	return nil
}

// wait waits until the kubelet is healthy.
func (k *kubelet) wait(ctx context.Context, n *Node) error {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	for {
		if k.client == nil {
			k.client = trusting(filepath.Join(n.Dir(), "pki", "kubelet.crt"))
		}
		if k.client != nil {
			if _, err := k.call(ctx, http.MethodGet, "/healthz"); err == nil {
				return nil
			}
		}
		select {
		case <-k.exited:
			return fmt.Errorf("start the kubelet: it ended: %s", k.cmd.ProcessState)
		case <-ctx.Done():
			return fmt.Errorf("wait for the kubelet: %w", context.Cause(ctx))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// trusting is a client that trusts the kubelet's certificate, nil while there is
// none.
func trusting(certificate string) *http.Client {
	pem, err := os.ReadFile(certificate)
	if err != nil {
		return nil
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: nodeName}}}
}

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

// stop ends the kubelet. Its pods stay.
func (k *kubelet) stop() error {
	if k == nil || k.cmd == nil || k.cmd.Process == nil {
		return nil
	}
	_ = k.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-k.exited:
	case <-time.After(endLimit):
		_ = k.cmd.Process.Kill()
		<-k.exited
	}
	return nil
}

// freePort is a TCP port of this machine that nothing listens on now.
func freePort() (int, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer listener.Close()
	return listener.Addr().(*net.TCPAddr).Port, nil
}
