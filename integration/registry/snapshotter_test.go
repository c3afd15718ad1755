// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// plugin is gpuckpt's snapshotter, a process of its own.
type plugin struct {
	dir string
	cmd *exec.Cmd

	mu  sync.Mutex
	log []byte
}

// Write takes what the process logs.
func (p *plugin) Write(text []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.log = append(p.log, text...)
	return len(text), nil
}

// withPlugin starts a containerd whose snapshotter is gpuckpt's.
func withPlugin(t *testing.T) (*harness.Containerd, *plugin) {
	t.Helper()
	p := &plugin{}
	t.Cleanup(func() { p.stop(t, syscall.SIGKILL) }) // after containerd
	c := session.Own(t, harness.Options{Snapshotter: "gpuckpt", ConfigIn: func(dir string) string {
		p.dir = dir
		p.start(t)
		// What the documentation has people use, with the test's paths.
		config, err := os.ReadFile("../../deploy/snapshotter.toml")
		if err != nil {
			t.Fatal(err)
		}
		return strings.NewReplacer("version = 3\n", "", "/run/gpuckpt-snapshotter/snapshotter.sock", p.socket(), "/var/lib/gpuckpt/snapshotter", p.root()).Replace(string(config))
	}})
	return c, p
}

func (p *plugin) socket() string { return filepath.Join(p.dir, "snap.sock") }
func (p *plugin) root() string   { return filepath.Join(p.dir, "snapshots") }

func (p *plugin) start(t *testing.T, more ...string) {
	t.Helper()
	program, err := bins.Path("gpuckpt")
	if err != nil {
		t.Fatal(err)
	}
	args := []string{"snapshotter", "--root", p.root(), "--listen", p.socket(), "--address", filepath.Join(p.dir, "c.sock"), "--attempts", "2"}
	p.cmd = exec.Command(program, append(args, more...)...)
	p.cmd.Env = []string{"HOME=" + t.TempDir(), "PATH=" + bins.SearchPath()}
	p.cmd.Stdout, p.cmd.Stderr = p, p
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.within(t, "the snapshotter serves", func() bool {
		c, err := net.Dial("unix", p.socket())
		if err == nil {
			c.Close()
		}
		return err == nil
	})
}

// stop ends the process by a signal.
func (p *plugin) stop(t *testing.T, by syscall.Signal) {
	t.Helper()
	if p.cmd != nil && p.cmd.Process != nil {
		_ = p.cmd.Process.Signal(by)
		_ = p.cmd.Wait() // by the signal
		p.cmd = nil
	}
}

func (p *plugin) said() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return string(p.log)
}

// within waits for what the snapshotter does.
func (p *plugin) within(t *testing.T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(2 * time.Minute); !so(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not in two minutes\n%s", what, p.said())
		}
	}
}

// left is what says that something is still to be fetched.
func (p *plugin) left(t *testing.T) (left []string) {
	t.Helper()
	for _, pattern := range []string{"arriving/*", "snapshots/*/gpuckpt-arriving.sock*"} {
		found, err := filepath.Glob(filepath.Join(p.root(), pattern))
		if err != nil {
			t.Fatal(err)
		}
		left = append(left, found...)
	}
	return left
}

// allHere waits until nothing is to be fetched any more.
func (p *plugin) allHere(t *testing.T) {
	t.Helper()
	p.within(t, "all has arrived", func() bool { return len(p.left(t)) == 0 })
}

// pull pulls the image with ctr.
func (r *away) pull(t *testing.T, more ...string) {
	t.Helper()
	args := append([]string{"images", "pull", "--plain-http", "--snapshotter", "gpuckpt"}, more...)
	if _, err := r.c.Ctr(t.Context(), append(args, r.name)...); err != nil {
		t.Fatalf("%v\n%s", err, r.c.LogTail(3000))
	}
}

// remove removes images, and all that they alone need.
func (r *away) remove(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		if err := r.c.Client().ImageService().Delete(t.Context(), name, images.SynchronousDelete()); err != nil {
			t.Fatal(err)
		}
	}
}

// runs is whether a container has a task.
func (r *away) runs(t *testing.T, id string) bool {
	t.Helper()
	k, err := r.c.Client().LoadContainer(t.Context(), id)
	if err == nil {
		_, err = k.Task(t.Context(), nil)
	}
	return err == nil
}

// The snapshotter's whole way, each part from where the image is in its registry alone.
func TestSnapshotter(t *testing.T) {
	results.Add(t)
	c, p := withPlugin(t)
	r := sentBy(t, c)
	for _, part := range []struct {
		name string
		of   func(*testing.T, *plugin, *away)
	}{{"streams", streams}, {"killed", killed}, {"disturbed", disturbed}, {"overlayfs", overlayfs}, {"given up", givenUp}} {
		if !t.Run(part.name, func(t *testing.T) { part.of(t, p, r) }) {
			t.Fatalf("the snapshotter said:\n%s", p.said())
		}
		r.meddle.Store(nil)
		r.remove(t, r.name)
	}
}

// A stock client's pull is done, and its container is restored, before any GPU state is there. Each
// byte is fetched once and written once.
func streams(t *testing.T, p *plugin, r *away) {
	r.remove(t, harness.WorkloadImage) // its layers are fetched as well, in the way of others
	before := r.fetched.Load()
	id := harness.Name(t) + "-resumed"
	var begun sync.Once
	r.disturb(func(q *http.Request, _ int, _ int64, _ []byte) (err error) {
		begun.Do(func() {
			for deadline := time.Now().Add(2 * time.Minute); !r.runs(t, id); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) || q.Context().Err() != nil {
					err = errors.New("the restore does not begin without GPU state")
					return
				}
			}
		})
		return err
	})
	r.pull(t)
	k := resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	p.allHere(t)
	if got := r.fetched.Load() - before; got > int64(r.made.Bytes)*21/20+16<<20 {
		t.Errorf("%d bytes were fetched of an image of %d", got, r.made.Bytes)
	}
	for _, l := range r.gpu {
		if has(t, r.c, l.Digest) {
			t.Errorf("containerd's content store has %s as well", l.Digest)
		}
	}
	p.within(t, "no lease and nothing half written is left", func() bool {
		leases, err := r.c.Client().LeasesService().List(t.Context())
		status, serr := r.c.Client().ContentStore().ListStatuses(t.Context())
		return err == nil && serr == nil && len(leases)+len(status) == 0
	})

	// The second container needs no registry, and a restart of the snapshotter changes nothing.
	k.MustRemove(t)
	p.stop(t, syscall.SIGTERM)
	p.start(t)
	before = r.fetched.Load()
	k = resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	if got := r.fetched.Load(); got != before {
		t.Errorf("%d bytes were fetched again", got-before)
	}
	// It counts what GPU state takes, which came after the commit.
	var used int64
	err := r.c.Client().SnapshotService("gpuckpt").Walk(t.Context(), func(ctx context.Context, i snapshots.Info) error {
		u, err := r.c.Client().SnapshotService("gpuckpt").Usage(ctx, i.Name)
		used += u.Size
		return err
	})
	if err != nil || used < 3*64<<20 {
		t.Errorf("the snapshots take %d bytes: %v", used, err)
	}
	k.MustRemove(t)
}

// A client that does not say which image a layer is of gets overlayfs, and so does an image whose
// registry does not answer the snapshotter.
func overlayfs(t *testing.T, p *plugin, r *away) {
	hosts := filepath.Join(t.TempDir(), r.host)
	if err := os.Mkdir(hosts, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(hosts, "hosts.toml"), []byte("server = \"http://127.0.0.1:1\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.pull(t, "--local")
	for {
		for _, l := range r.gpu {
			if !has(t, r.c, l.Digest) {
				t.Errorf("the client did not fetch %s itself", l.Digest)
			}
		}
		if hosts == "" {
			break
		}
		r.remove(t, r.name)
		p.stop(t, syscall.SIGTERM)
		p.start(t, "--hosts-dir", filepath.Dir(hosts))
		hosts = ""
		r.pull(t)
		if !strings.Contains(p.said(), "containerd fetches and unpacks it") {
			t.Errorf("the snapshotter does not say why it leaves the image alone:\n%s", p.said())
		}
	}
	k := resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.MustRemove(t)
}

// What is killed in the middle goes on after its restart, with what had arrived.
func killed(t *testing.T, p *plugin, r *away) {
	before, last := r.fetched.Load(), len(r.gpu)-1
	waits := make(chan struct{})
	var begun sync.Once
	r.disturb(func(q *http.Request, layer int, at int64, _ []byte) error {
		if layer == last && at > 1<<20 {
			begun.Do(func() { close(waits) })
			<-q.Context().Done()
			return q.Context().Err()
		}
		return nil
	})
	r.pull(t)
	<-waits
	p.within(t, "the other layers have arrived", func() bool {
		records, err := filepath.Glob(filepath.Join(p.root(), "arriving", "*.json"))
		if err != nil || len(records) != 1 {
			return false
		}
		text, err := os.ReadFile(records[0])
		return err == nil && strings.Count(string(text), `"arrived":true`) == last
	})
	p.stop(t, syscall.SIGKILL)
	r.meddle.Store(nil)
	p.start(t)
	k := resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	p.allHere(t)
	if got := r.fetched.Load() - before; got > int64(r.made.Bytes)+r.gpu[last].Bytes+8<<20 {
		t.Errorf("%d bytes were fetched of an image of %d", got, r.made.Bytes)
	}
	k.MustRemove(t)
}

// Wrong bytes refuse a restore, and the next container has them fetched again. An image that is
// removed while it arrives leaves nothing.
func disturbed(t *testing.T, p *plugin, r *away) {
	last := len(r.gpu) - 1
	r.disturb(func(_ *http.Request, layer int, at int64, part []byte) error {
		if layer == last && at > 1<<20 {
			part[0] ^= 1
		}
		return nil
	})
	r.pull(t)
	spec := harness.RunSpec{ID: harness.Name(t) + "-refused", Image: r.name, Port: r.port, Args: []string{"gpuwork"}, GPUs: []int{0}, Annotations: map[string]string{"dev.gpuckpt.restore": "true"}}
	_, err := r.c.TryWork(t, spec)
	harness.Says(t, err, r.gpu[last].Digest, "given up after 2 attempts")

	r.meddle.Store(nil)
	before := r.fetched.Load()
	k := resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.MustRemove(t)
	p.allHere(t)
	if got := r.fetched.Load() - before; got > r.gpu[last].Bytes*5/4 {
		t.Errorf("%d bytes were fetched, and only a layer of %d was missing", got, r.gpu[last].Bytes)
	}
	r.remove(t, r.name)

	waits := make(chan struct{})
	var begun sync.Once
	r.disturb(func(q *http.Request, _ int, _ int64, _ []byte) error {
		begun.Do(func() { close(waits) })
		<-q.Context().Done()
		return q.Context().Err()
	})
	r.pull(t)
	<-waits
	r.remove(t, r.name)
	p.within(t, "nothing is fetched for an image that was removed", func() bool { return len(p.left(t)) == 0 })
	r.meddle.Store(nil)
	r.pull(t)
	k = resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.MustRemove(t)
	p.allHere(t)
}

// A pull that was given up is not in the way of others of the same layers.
func givenUp(t *testing.T, p *plugin, r *away) {
	p.stop(t, syscall.SIGTERM)
	p.start(t) // it finds the registry again
	goOn := make(chan struct{})
	var once sync.Once
	defer once.Do(func() { close(goOn) })
	meddle := func(q *http.Request, _ int64, _ []byte) error {
		if path.Base(q.URL.Path) == r.criu.Digest {
			<-goOn
		}
		return nil
	}
	r.meddle.Store(&meddle)
	ctx, giveUp := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_, _ = r.c.Ctr(ctx, "images", "pull", "--plain-http", "--snapshotter", "gpuckpt", r.name) // it is killed
	}()
	p.within(t, "the pull holds GPU state", func() bool {
		status, err := r.c.Client().ContentStore().ListStatuses(t.Context())
		return err == nil && len(status) > len(r.gpu) // and CRIU's layer
	})
	giveUp()
	<-ended
	once.Do(func() { close(goOn) })
	ctx, end := context.WithTimeout(t.Context(), 2*time.Minute)
	defer end()
	if _, err := r.c.Ctr(ctx, "images", "pull", "--plain-http", "--snapshotter", "gpuckpt", "--local", r.name); err != nil {
		t.Fatalf("%v\n%s", err, r.c.LogTail(3000))
	}
}
