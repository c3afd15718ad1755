// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/images/catalog"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
)

// With --json an error is JSON as well, also one of a wrong call.
func TestErrorsAsJSON(t *testing.T) {
	m := newMachine(t, 1)
	for _, c := range []struct {
		args       []string
		says, help string
	}{
		{[]string{"gpuckpt", "ls", "--json", "--address", "/nowhere/c.sock"}, "reach containerd at /nowhere/c.sock", ""},
		{[]string{"gpuckpt", "suspend", "--json"}, "accepts 1 arg", "gpuckpt suspend --help"},
		{[]string{"gpuckpt", "ps", "--json", "--log-level", "loud"}, "it must be trace, debug, info, warn or error", "gpuckpt ps --help"},
		{[]string{"gpuckpt", "ps", "--json", "--what"}, "unknown flag: --what", "gpuckpt ps --help"},
	} {
		out, errs, exit := m.run(c.args...)
		var f failure
		if err := json.Unmarshal([]byte(errs), &f); err != nil || exit != 1 || out != "" {
			t.Errorf("%q: %v in %q, exit status %d, output %q", c.args, err, errs, exit, out)
		}
		if !strings.Contains(f.Error, c.says) || f.Help != c.help {
			t.Errorf("%q: %+v", c.args, f)
		}
	}
}

// What a socket or a file refuses to who is not root needs root, and no other socket.
func TestNeedsRoot(t *testing.T) {
	for _, err := range []error{&net.OpError{Op: "dial", Err: unix.EACCES}, &fs.PathError{Op: "open", Path: "/run/gpuckpt-install.lock", Err: unix.EACCES}} {
		if needsRoot(err, 1000) == "" || needsRoot(err, 0) != "" {
			t.Error(err)
		}
	}
	if hint := needsRoot(unix.ENOENT, 1000); hint != "" {
		t.Error(hint)
	}
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	if got := interrupted(ctx, "push: context canceled"); got != "push: context canceled" {
		t.Errorf("without Ctrl-C: %q", got)
	}
	cancel(errors.New("interrupt signal received")) // signal.NotifyContext
	if got := interrupted(ctx, "push: context canceled\npull: interrupt signal received"); got != "push: interrupted\npull: interrupted" {
		t.Errorf("got %q", got)
	}
}

// Every command has a man page.
func TestManPages(t *testing.T) {
	m, dir := newMachine(t, 1), t.TempDir()
	m.prints("", "gpuckpt", "man", dir)
	pages, err := os.ReadDir(dir)
	if err != nil || len(pages) < 20 {
		t.Fatalf("%v, %v", pages, err)
	}
	page, err := os.ReadFile(dir + "/gpuckpt-image-push.1")
	if err != nil || !strings.Contains(string(page), "--parallel") && !strings.Contains(string(page), `\-\-parallel`) {
		t.Errorf("%v, %s", err, page)
	}
}

// What an image says of itself is in its own line and column: it says nothing of other images, or of who
// signed it.
func TestOneLineAnImage(t *testing.T) {
	name := "job\tjust now ago\t1GiB\t1GiB\tours\nexample.com/other:1\tjob"
	if text := lsText([]catalog.Entry{{Image: "example.com/job:1", Container: name}}, time.Now()); strings.Count(text, "\n") != 2 || !strings.Contains(text, `job\tjust now`) {
		t.Errorf("ls prints %s", text)
	}
	a := inspectAnswer{Image: &oci.Image{Annotations: map[string]string{annotations.ContainerName: name}, Metadata: new(images.Metadata)}}
	if text := a.words(); !strings.Contains(text, `ours\nexample.com`) {
		t.Errorf("inspect prints %s", text)
	}
}

// A key that a command names and that is not there is told of before anything else is done: no container is
// ended, and no image is sent or read. Nothing is encrypted for whom without a push.
func TestNoSuchKey(t *testing.T) {
	m := newMachine(t, 1)
	for _, args := range [][]string{
		{"checkpoint", "job", "--push", "example.com/job:1", "--encrypt", "/nowhere/key.pub"},
		{"image", "verify", "example.com/job:1", "--key", "/nowhere/key.pub"},
		{"image", "pull", "example.com/job:1", "--decrypt-key", "/nowhere/key.pub"},
	} {
		if _, errs, exit := m.run(append([]string{"gpuckpt"}, append(args, "--address", "/nowhere/c.sock")...)...); exit != 1 || !strings.Contains(errs, "/nowhere/key.pub: no such file") {
			t.Errorf("%q: exit status %d, %s", args, exit, errs)
		}
	}
	if err := there([]string{"jwe:/dev/null", "pkcs7:/dev/null", "/dev/null"}); err != nil {
		t.Error(err)
	}
	if _, errs, _ := m.run("gpuckpt", "checkpoint", "job", "--image", "example.com/job:1", "--encrypt", "/nowhere/key.pub"); !strings.Contains(errs, "--encrypt is for --push") {
		t.Error(errs)
	}
}

// Who sends an image again sends it encrypted for the same, out of the same namespace.
func TestSendAgain(t *testing.T) {
	p := pushed{recipients: []string{"a.pub", "b.pub"}}
	if got := p.again(namespaces.WithNamespace(t.Context(), "k8s.io"), "job:1", "there:1"); got != "gpuckpt image push --namespace k8s.io --encrypt a.pub --encrypt b.pub job:1 there:1" {
		t.Error(got)
	}
}

// An image that was named NAME@DIGEST is printed so.
func TestDigestOnce(t *testing.T) {
	of := digest.FromString("job")
	for _, name := range []string{"r.test/job:1", "r.test/job:1@" + of.String()} {
		if got := (&transferAnswer{Image: name, Digest: of, Result: new(registry.Result)}).words("sent"); !strings.HasPrefix(got, "r.test/job:1@"+of.String()+"\n") {
			t.Error(got)
		}
	}
}

// Names in JSON begin with a small letter.
func TestNamesInJSON(t *testing.T) {
	data, err := json.Marshal(&inspectAnswer{Image: new(oci.Image), Metadata: new(images.Metadata), Files: make([]inspectFile, 1)})
	if names := regexp.MustCompile(`"[A-Z]\w*":`).FindAllString(string(data), -1); err != nil || len(names) > 0 {
		t.Errorf("%v, %v", names, err)
	}
}

// ps names the pods where there are some, and a line is one container's.
func TestPsNamesPods(t *testing.T) {
	labels := map[string]string{"io.kubernetes.pod.namespace": "team", "io.kubernetes.pod.name": "trainer", "io.kubernetes.container.name": "main"}
	text := psText([]listed{{Container: "c1", Pod: capture.PodOf(labels)}, {Container: "c2", Pod: capture.PodOf(nil), Problem: "one\ntwo"}}, time.Now())
	if lines := strings.Split(text, "\n"); len(lines) != 4 || !strings.Contains(lines[0], "POD") || !strings.Contains(lines[1], "team/trainer/main") || strings.Contains(lines[2], "team") {
		t.Errorf("ps prints %s", text)
	}
	if text := psText([]listed{{Container: "c1"}}, time.Now()); strings.Contains(text, "POD") {
		t.Errorf("ps prints %s", text)
	}
}
