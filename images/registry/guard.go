// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/docker/go-units"
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
	t.DialContext = (&net.Dialer{Timeout: dialTimeout, Control: notOwn}).DialContext
	g.proxy, g.elsewhere = t.Proxy, t
	return g
}

// dialTimeout is that of containerd's own connections.
const dialTimeout = 30 * time.Second

// notOwn refuses a connection to an address of the machine's own before it is made.
func notOwn(_, address string, _ syscall.RawConn) error {
	at, err := netip.ParseAddrPort(address)
	if ip := at.Addr().Unmap(); err == nil && !ip.IsLoopback() && !ip.IsLinkLocalUnicast() && !ip.IsUnspecified() && !isCloud(ip) {
		return nil
	}
	return finalError{fmt.Errorf("the registry names an address of this machine, %s: it is not asked", address)}
}

// isCloud reports whether a cloud answers a machine at an address, with the machine's own credentials among
// others. Most do so at a link-local one; these are Amazon's and Google's of IPv6, Alibaba's, Azure's and
// Oracle's.
func isCloud(ip netip.Addr) bool {
	return slices.Contains([]string{"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"}, ip.WithZone("").String())
}

// maxToken bounds the answer to who asks for a token, which containerd reads whole.
const maxToken = 1 << 20

// RoundTrip is http.RoundTripper's.
func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	answer, err := g.send(r)
	if err == nil && r.Header.Get("Accept") == "" { // all that is read as it comes is asked for by its media type
		answer.Body = &short{answer.Body, maxToken}
	}
	return answer, err
}

// short is a body that must not be long.
type short struct {
	io.ReadCloser
	left int
}

func (s *short) Read(p []byte) (int, error) {
	n, err := s.ReadCloser.Read(p[:min(len(p), s.left+1)])
	if s.left -= n; s.left < 0 {
		return 0, finalError{fmt.Errorf("the registry's answer has more than %s", units.BytesSize(maxToken))}
	}
	return n, err
}

func (g *guard) send(r *http.Request) (*http.Response, error) {
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
