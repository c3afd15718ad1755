// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// authority issues the certificates of one node: who may ask the kubelet and the
// API server, and that these are who they say.
type authority struct {
	dir         string
	certificate *x509.Certificate
	key         crypto.Signer
}

// newAuthority makes an authority that keeps what it issues in a directory.
func newAuthority(dir string) (*authority, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make certificates: %w", err)
	}
	a := &authority{dir: dir}
	template := template(pkix.Name{CommonName: "gpuckpt-test"})
	template.IsCA, template.BasicConstraintsValid = true, true
	template.KeyUsage = x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature
	return a, a.sign("ca", template)
}

func template(subject pkix.Name) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()),
		Subject:      subject,
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
	}
}

// issue makes a certificate for a client of that name and groups, and for a server
// at those addresses.
func (a *authority) issue(file, name string, groups []string, addresses ...string) error {
	t := template(pkix.Name{CommonName: name, Organization: groups})
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	for _, address := range addresses {
		t.IPAddresses = append(t.IPAddresses, net.ParseIP(address))
	}
	return a.sign(file, t)
}

// sign makes a key and a certificate, the authority's own at first.
func (a *authority) sign(file string, template *x509.Certificate) error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	parent, signer := template, crypto.Signer(key)
	if a.certificate != nil {
		parent, signer = a.certificate, a.key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		return fmt.Errorf("make the certificate %s: %w", file, err)
	}
	if a.certificate == nil {
		a.key = key
		if a.certificate, err = x509.ParseCertificate(der); err != nil {
			return fmt.Errorf("make the certificate %s: %w", file, err)
		}
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return fmt.Errorf("make a key: %w", err)
	}
	for path, block := range map[string]*pem.Block{
		a.path(file):    {Type: "CERTIFICATE", Bytes: der},
		a.keyPath(file): {Type: "EC PRIVATE KEY", Bytes: keyDER},
	} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			return fmt.Errorf("keep the certificate %s: %w", file, err)
		}
	}
	return nil
}

// path and keyPath are the files of a certificate and of its key.
func (a *authority) path(file string) string    { return filepath.Join(a.dir, file+".crt") }
func (a *authority) keyPath(file string) string { return filepath.Join(a.dir, file+".key") }

// client is an HTTP client with the certificate of that name.
func (a *authority) client(file string) (*http.Client, error) {
	pair, err := tls.LoadX509KeyPair(a.path(file), a.keyPath(file))
	if err != nil {
		return nil, fmt.Errorf("read the certificate %s: %w", file, err)
	}
	roots := x509.NewCertPool()
	roots.AddCert(a.certificate)
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}}}, nil
}
