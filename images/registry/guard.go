// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/containerd/containerd/v2/core/remotes/docker"
)

// guarded has the hosts of a registry send this program nowhere that is the machine's own: an answer of
// the registry's may name any address, and whoever pushes may reach more than the registry does.
func guarded(hosts docker.RegistryHosts) docker.RegistryHosts {
	return func(host string) ([]docker.RegistryHost, error) {
		all, err := hosts(host)
		var own []string
		for _, h := range all {
			own = append(own, withPort(h.Scheme, h.Host))
		}
		for _, h := range all {
			if _, ok := h.Client.Transport.(*guard); !ok { // several share a client, which their authorizers have too
				h.Client.Transport = newGuard(h.Client.Transport, own)
			}
		}
		return all, err
	}
}

// guard lets requests through to the registry's own hosts. To others it lets questions through, such as for
// a token or a blob that lies elsewhere, but no upload. None of the others is at a loopback or
// link-local address, unless the registry is at a loopback address itself.
type guard struct {
	own       http.RoundTripper
	hosts     []string // HOST:PORT
	proxy     func(*http.Request) (*url.URL, error)
	elsewhere http.RoundTripper
}

func newGuard(own http.RoundTripper, hosts []string) *guard {
	g := &guard{own: own, hosts: hosts, elsewhere: own}
	if slices.ContainsFunc(hosts, docker.IsLocalhost) {
		return g
	}
	t, ok := own.(*http.Transport)
	if !ok {
		t = docker.DefaultHTTPTransport(&tls.Config{})
	}
	t = t.Clone()
	dial := t.DialContext
	if dial == nil {
		dial = new(net.Dialer).DialContext
	}
	t.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		if a, ok := c.RemoteAddr().(*net.TCPAddr); ok && (a.IP.IsLoopback() || a.IP.IsLinkLocalUnicast() || a.IP.IsUnspecified()) {
			c.Close()
			return nil, finalError{fmt.Errorf("the registry names an address of this machine, %s: it is not asked", address)}
		}
		return c, nil
	}
	g.proxy, g.elsewhere = t.Proxy, t
	return g
}

// RoundTrip is http.RoundTripper's.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if slices.Contains(g.hosts, withPort(r.URL.Scheme, r.URL.Host)) {
		return g.own.RoundTrip(r)
	}
	// Some ask for a token by a form.
	if asks := r.Method == http.MethodGet || r.Method == http.MethodHead || strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-www-form-urlencoded"); !asks {
		if r.Body != nil {
			r.Body.Close()
		}
		return nil, finalError{fmt.Errorf("the registry wants the upload at another host, %s: it is not sent there", r.URL.Host)}
	}
	if g.proxy != nil {
		if by, err := g.proxy(r); err != nil || by != nil { // the address that is dialled is the proxy's
			return g.own.RoundTrip(r)
		}
	}
	return g.elsewhere.RoundTrip(r)
}

func withPort(scheme, host string) string {
	if _, _, err := net.SplitHostPort(host); err == nil {
		return host
	}
	port := "443"
	if scheme == "http" {
		port = "80"
	}
	return net.JoinHostPort(strings.Trim(host, "[]"), port)
}
