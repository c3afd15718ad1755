// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// testPassword of the user "test" in testUsers, a line of htpasswd (bcrypt).
const (
	testPassword = "test"
	testUsers    = "test:$2a$05$dSzYAYxmbdR/0ESK8c/zOeeQ8dKh.OCBOpKOzQUDFja5PiWqdnmdW\n"
)

// server is a registry of distribution's behind a proxy that counts, and that
// can break.
type server struct {
	host string // of the proxy, "127.0.0.1:4711"

	sent, fetched atomic.Int64 // bytes of blobs through the proxy
	// breakAfter is how many bytes of blobs still go through before connections
	// are cut; negative is no limit.
	breakAfter atomic.Int64
	// meddle is called with each part of a blob that is fetched, and where it is in the blob, if it
	// is set. It may change the part, take its time, or cut the connection by an error.
	meddle atomic.Pointer[func(r *http.Request, at int64, part []byte) error]
	// sending is called when a blob begins to be sent, if it is set.
	sending atomic.Pointer[func()]
}

// serve starts a registry that the test's end stops.
func serve(t *testing.T, authenticate bool) *server {
	t.Helper()
	program, err := bins.Path("registry")
	if err != nil {
		t.Fatalf("%v; run hack/setup", err)
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	config := fmt.Sprintf("version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: '127.0.0.1:%d'}\n", dir, port)
	if authenticate {
		users := filepath.Join(dir, "users")
		if err := os.WriteFile(users, []byte(testUsers), 0o600); err != nil {
			t.Fatal(err)
		}
		config += fmt.Sprintf("auth: {htpasswd: {realm: test, path: %s}}\n", users)
	}
	file := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "serve", file)
	cmd.Env = []string{"PATH=" + bins.SearchPath(), "OTEL_TRACES_EXPORTER=none"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	backend := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", backend)
		if err == nil {
			c.Close()
			break
		}
		if time.Now().After(deadline) {
			text, _ := os.ReadFile(log.Name())
			t.Fatalf("the registry does not answer: %v\n%s", err, text)
		}
	}
	s := &server{}
	s.breakAfter.Store(-1)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.host = listener.Addr().String()
	proxy := &httputil.ReverseProxy{
		// The registry makes its addresses of the Host header, so it stays.
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "http", Host: backend})
			r.Out.Host = r.In.Host
		},
		ModifyResponse: func(r *http.Response) error {
			if r.Request.Method == http.MethodGet {
				r.Body = &through{ReadCloser: r.Body, s: s, count: &s.fetched, fetch: r.Request, at: begin(r)}
			}
			return nil
		},
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
	}
	web := &http.Server{ReadHeaderTimeout: time.Minute, ErrorLog: nil, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodPut || r.Method == http.MethodPatch {
			if sending := s.sending.Load(); sending != nil && strings.Contains(r.URL.Path, "/blobs/") {
				(*sending)()
			}
			r.Body = &through{ReadCloser: r.Body, s: s, count: &s.sent}
		}
		proxy.ServeHTTP(w, r)
	})}
	go func() { _ = web.Serve(listener) }() // until Close
	t.Cleanup(func() { _ = web.Close() })
	return s
}

// ref is an image's name in the registry.
func (s *server) ref(name string) string { return s.host + "/" + name }

// through is data on its way through the proxy.
type through struct {
	io.ReadCloser
	s     *server
	count *atomic.Int64
	fetch *http.Request // of what is fetched
	at    int64
}

// begin is where in a blob an answer begins.
func begin(r *http.Response) (at int64) {
	_, _ = fmt.Sscanf(r.Header.Get("Content-Range"), "bytes %d-", &at) // 0 without
	return at
}

func (b *through) Read(p []byte) (int, error) {
	if len(p) > 32<<10 {
		p = p[:32<<10]
	}
	n, err := b.ReadCloser.Read(p)
	b.count.Add(int64(n))
	if meddle := b.s.meddle.Load(); meddle != nil && n > 0 && b.fetch != nil && strings.Contains(b.fetch.URL.Path, "/blobs/") {
		if merr := (*meddle)(b.fetch, b.at, p[:n]); merr != nil {
			return 0, merr
		}
	}
	b.at += int64(n)
	if left := b.s.breakAfter.Load(); left >= 0 && n > 0 {
		if b.s.breakAfter.Add(int64(-n)) < 0 {
			b.s.breakAfter.Store(0)
			return 0, fmt.Errorf("the test cuts the connection")
		}
	}
	return n, err
}
