// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"
)

// The name and password that the registry asks for.
const (
	registryUser     = "puller"
	registryPassword = "test-only"
)

// Registry is a registry of images on a port of this machine, in memory. It asks
// for a name and a password, for pulls as for pushes.
type Registry struct {
	// Host is "address:port", how images' names begin.
	Host   string
	server *http.Server
	roots  *x509.CertPool // who has issued its certificate; nil without
	writes sync.RWMutex   // each holds it to read
	held   atomic.Int32   // that wait for it
}

// Held reports whether a push waits.
func (r *Registry) Held() bool { return r.held.Load() > 0 }

// Hold has pushes wait until release is called.
func (r *Registry) Hold() (release func()) {
	r.writes.Lock()
	return r.writes.Unlock
}

// startRegistry starts one at the node's address; for a cluster of machines at one that all reach, with
// a certificate.
func (n *Node) startRegistry() (*Registry, error) {
	if n.cluster == nil {
		return newRegistry(n.network.gateway, "", "")
	}
	if err := n.authority.issue("registry", "registry", nil, n.cluster.gateway); err != nil {
		return nil, err
	}
	r, err := newRegistry(n.cluster.gateway, n.authority.path("registry"), n.authority.keyPath("registry"))
	if err == nil {
		r.roots = x509.NewCertPool()
		r.roots.AddCert(n.authority.certificate)
	}
	return r, err
}

// newRegistry starts one at an address of this machine, with TLS if there is a certificate.
func newRegistry(address, certificate, key string) (*Registry, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		return nil, fmt.Errorf("start the registry: %w", err)
	}
	images := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	r := &Registry{Host: listener.Addr().String()}
	r.server = &http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, request *http.Request) {
		if user, password, _ := request.BasicAuth(); user != registryUser || password != registryPassword {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			http.Error(w, `{"errors":[{"code":"UNAUTHORIZED","message":"authentication required"}]}`, http.StatusUnauthorized)
			return
		}
		if request.Method != http.MethodGet && request.Method != http.MethodHead {
			r.held.Add(1)
			r.writes.RLock()
			r.held.Add(-1)
			defer r.writes.RUnlock()
		}
		images.ServeHTTP(w, request)
	})}
	go func() { // ends with close
		if certificate == "" {
			_ = r.server.Serve(listener)
		} else {
			_ = r.server.ServeTLS(listener, certificate, key)
		}
	}()
	return r, nil
}

// trust has the containerd of an instance take the registry without TLS.
func (r *Registry) trust(dir string) error {
	dir = filepath.Join(tlsDir(dir), r.Host)
	hosts := fmt.Sprintf("server = \"http://%[1]s\"\n[host.\"http://%[1]s\"]\ncapabilities = [\"pull\", \"resolve\"]\n", r.Host)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644)
	}
	if err != nil {
		return fmt.Errorf("make the registry known: %w", err)
	}
	return nil
}

// Credentials are a docker config.json with the registry's name and password: the
// content of a pull secret, and what clients read that push.
func (r *Registry) Credentials() ([]byte, error) {
	auth := base64.StdEncoding.EncodeToString([]byte(registryUser + ":" + registryPassword))
	return json.Marshal(map[string]any{"auths": map[string]any{r.Host: map[string]string{"auth": auth}}})
}

// Transport is how the tests reach it.
func (r *Registry) Transport() http.RoundTripper {
	return &http.Transport{TLSClientConfig: &tls.Config{RootCAs: r.roots}}
}

func (r *Registry) close() error {
	if r == nil {
		return nil
	}
	return r.server.Close()
}

// Login is the name and the password that the registry asks for.
func (r *Registry) Login() (user, password string) { return registryUser, registryPassword }
