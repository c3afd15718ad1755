// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/hostile/trials"
	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
)

// always are changes that once did what they were to do.
var always = regexp.MustCompile(`^a restore that pulls: .*/layers/4/annotations/dev.gpuckpt.area: an area at path 1$|` +
	`^a pull: .*/Labels/nerdctl/state-dir: path 0$`)

// Every field of what describes an image is changed by every kind of value, and the image goes every way:
// through a restore while it is pulled, a pull, and an archive. It is refused, or it is restored and harmless.
func TestEveryFieldOfManifests(t *testing.T) {
	tries := chosen(t, 1200)
	good := checkpointed(t)
	c := newCanaries(t)
	s := &trials.Trials{Host: &c.Kept, New: func(t *testing.T) trials.Place { return newNode(t, good) }}
	nodes := []*node{newNode(t, good), newNode(t, good)}
	s.Log = func() string { return nodes[0].c.LogTail(2000) }
	c.keep(t, func() {
		for _, n := range nodes {
			for way := range ways {
				if wrong, failed := n.Restore(t, way, nil); failed != nil || len(wrong) > 0 {
					t.Fatalf("the image as it was, by %s: %v, %v\n%s", way, failed, wrong, n.c.LogTail(4000))
				}
			}
		}
	})
	queue, wait := restoring(t, s, nodes[0], nodes[1])
	changes, restored := map[string]int{}, 0
	paths := c.paths()
	good.each([]string{paths[0], paths[2]}, func(field, kind string, made func() sent) {
		for way := range ways {
			change := imagetest.Change{File: way, Kind: field + ": " + kind}
			if !tries(change) && !always.MatchString(change.String()) || t.Context().Err() != nil {
				continue
			}
			change.Image = encoded(made())
			changes[way]++
			queue <- change
		}
	})
	wait()
	all, since := s.All()
	report(t, all)
	for _, r := range all {
		if len(r.Wrong) > 0 {
			t.Errorf("%v: it said %.2000v, and: %v", r.Change, r.Failed, r.Wrong)
		}
		if r.Failed == nil {
			restored++
		}
	}
	if len(since) > 0 || len(all) == 0 {
		t.Errorf("after the last of %d changes: %v", len(all), since)
	}
	t.Logf("changes by way: %v; %d were restored", changes, restored)
}

// node is a containerd, a registry, and a checkpoint image.
type node struct {
	c     *harness.Containerd
	image *picture
	kept  []string // the snapshots of other images
	cdi   string
	web   *httptest.Server
	dir   string
	count int

	mu  sync.Mutex
	now sent // what the registry has
}

// checkpointed makes the image of a program with GPU memory.
func checkpointed(t *testing.T) *picture {
	t.Helper()
	k := checking.Work(t, harness.RunSpec{OwnNetwork: true, GPUs: []int{0}}, "pattern", "--bytes", "1048576", "--chunks", "1")
	harness.Within(t, "the program has GPU memory", func() bool { return strings.Contains(k.Logs(), "ready") })
	const name = "gpuckpt.test/good:1"
	var answer harness.CheckpointAnswer
	if err := checking.Gpuckpt(t.Context(), &answer, "checkpoint", k.ID, "--image", name); err != nil {
		t.Fatal(err)
	}
	k.MustRemove(t)
	p := newPicture(t, checking, name)
	if err := checking.ForgetImages(t.Context()); err != nil {
		t.Fatal(err)
	}
	return p
}

func newNode(t *testing.T, image *picture) *node {
	t.Helper()
	n := &node{image: image, dir: t.TempDir(), cdi: t.TempDir()}
	n.web = httptest.NewServer(n)
	t.Cleanup(n.web.Close)
	n.c = tests.Own(t, harness.Options{ShimConfig: patience + harness.AnyCheckpoint})
	if err := n.c.WriteCDISpec(n.cdi); err != nil {
		t.Fatal(err)
	}
	n.kept = n.snapshots(t.Context())
	return n
}

// ServeHTTP answers as a registry that has the image by any name.
func (n *node) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n.mu.Lock()
	now := n.now
	n.mu.Unlock()
	of := path.Base(r.URL.Path)
	data, ok := now.Blobs[digest.Digest(of)]
	if !ok {
		data, ok = n.image.blobs[digest.Digest(of)]
	}
	kind := "application/octet-stream"
	if path.Base(path.Dir(r.URL.Path)) == "manifests" {
		kind = ocispec.MediaTypeImageManifest
		if of == "1" || of == now.Top.Digest.String() {
			data, ok, kind = now.Blobs[now.Top.Digest], true, now.Top.MediaType
		}
	}
	switch {
	case of == "v2":
	case !ok:
		http.NotFound(w, r)
	case r.Method == http.MethodPut:
		w.WriteHeader(http.StatusCreated)
	default:
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Docker-Content-Digest", digest.FromBytes(data).String())
		http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(data))
	}
}

// ways restore an image, each by another door, and return why it was not restored.
var ways = map[string]func(n *node, t *trip) error{
	"a restore that pulls": func(n *node, t *trip) error { return t.restore("--pull", "--attempts", "1") },
	"a pull": func(n *node, t *trip) error {
		if err := t.gpuckpt("image", "pull", "--attempts", "1", t.name); err != nil {
			return err
		}
		t.look(t.name)
		_ = t.gpuckpt("ls")
		_ = t.gpuckpt("image", "push", "--attempts", "1", t.name, t.name)
		return t.restore()
	},
	"an archive": func(n *node, t *trip) error {
		file := filepath.Join(n.dir, "image.tar")
		defer os.Remove(file)
		if err := n.write(file, t.name); err != nil {
			return err
		}
		archive := "oci-archive:" + file
		t.look(archive)
		if err := t.gpuckpt("image", "convert", archive, t.name); err != nil {
			return err
		}
		return t.restore()
	},
}

// trip is one image on its way.
type trip struct {
	*node
	ctx      context.Context
	id, name string
	wrong    []string
}

// restore restores the image by the command line.
func (t *trip) restore(more ...string) error {
	failed := t.gpuckpt(append([]string{"restore", t.name, "--name", t.id, "--gpus", "0", "--cdi-spec-dirs", t.cdi, "--snapshotter", t.c.Snapshotter()}, more...)...)
	if failed != nil {
		return failed
	}
	made, err := t.c.Client().ContainerService().Get(t.ctx, t.id)
	for name, value := range made.Labels { // containerd and its clients do what these say
		if strings.HasPrefix(name, "containerd.io/") || strings.HasPrefix(name, "io.cri-containerd") || strings.HasPrefix(name, "nerdctl/") {
			t.wrong = append(t.wrong, fmt.Sprintf("the label %s=%.100q", name, value))
		}
	}
	return err
}

// look does with an image whatever does not change containerd.
func (t *trip) look(at string) {
	for _, args := range [][]string{
		{"image", "inspect", at}, {"image", "verify", at}, {"doctor", "--image", at},
		{"image", "convert", at, "kubernetes-archive:" + filepath.Join(t.dir, "kubernetes.tar")},
		{"image", "convert", at, "oci:" + filepath.Join(t.dir, "layout") + "@example.com/x:1"},
		{"image", "convert", at, "oci-archive:" + filepath.Join(t.dir, "copy.tar") + "@example.com/x:1"},
	} {
		_ = t.gpuckpt(args...) // its errors are errors: that is looked at
		for _, made := range []string{"kubernetes.tar", "layout", "copy.tar"} {
			if err := os.RemoveAll(filepath.Join(t.dir, made)); err != nil {
				t.wrong = append(t.wrong, err.Error())
			}
		}
	}
}

// What a command may take, on a machine with whatever load. A good image takes a second and some 60 MiB.
const (
	takes  = time.Minute
	mostKB = 768 << 10
)

// gpuckpt runs the command line, and looks at how it ends.
func (t *trip) gpuckpt(args ...string) error {
	ctx, cancel := context.WithTimeout(t.ctx, takes)
	defer cancel()
	cmd, err := t.c.Command(ctx, "gpuckpt", args...)
	if err != nil {
		return err
	}
	cmd.Env = append(cmd.Env, "CONTAINERD_ADDRESS="+t.c.Address(), "CONTAINERD_NAMESPACE="+t.c.Namespace(), "GPUCKPT_IMAGE_PATH="+t.c.Dumps())
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGQUIT) }, 10*time.Second // it says where it is
	out, err := cmd.CombinedOutput()
	usage, ok := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	switch text := string(out); {
	case ctx.Err() != nil:
		t.wrong = append(t.wrong, fmt.Sprintf("gpuckpt %s takes more than %v: %s", args, takes, out))
	case strings.Contains(text, "panic: ") || strings.Contains(text, "goroutine ") || strings.Contains(text, "fatal error: ") || err != nil && cmd.ProcessState.ExitCode() != 1:
		t.wrong = append(t.wrong, fmt.Sprintf("gpuckpt %s: %v: %.4000s", args, err, text))
	case ok && usage.Maxrss > mostKB:
		t.wrong = append(t.wrong, fmt.Sprintf("gpuckpt %s takes %d KiB of memory", args, usage.Maxrss))
	case strings.Contains(text, "\x1b") || strings.ContainsRune(text, 0):
		t.wrong = append(t.wrong, fmt.Sprintf("gpuckpt %s prints %.400q", args, text))
	}
	if err != nil {
		err = fmt.Errorf("gpuckpt %s: %w: %.1000s", args[0], err, out)
	}
	return err
}

// Restore has an image, or the good one, go a way.
func (n *node) Restore(t *testing.T, way string, image []byte) (wrong []string, failed error) {
	made := n.image.with(spot{"Manifest", "schemaVersion"}, 2)
	if image != nil {
		made = sent{}
		if err := json.Unmarshal(image, &made); err != nil {
			t.Fatal(err)
		}
	}
	n.mu.Lock()
	n.now = made
	n.mu.Unlock()
	n.count++
	ctx, cancel := context.WithTimeout(t.Context(), hangs)
	defer cancel()
	trip := &trip{node: n, ctx: ctx, id: fmt.Sprintf("trial-%s-%d", n.c.Namespace(), n.count), name: fmt.Sprintf("%s/trial-%d:1", n.web.Listener.Addr(), n.count)}
	failed = ways[way](n, trip)
	wrong = append(wrong, trip.wrong...)
	var left []string
	for deadline := time.Now().Add(settles); ; time.Sleep(50 * time.Millisecond) {
		// Again: containerd may still be at the end of a pull that has failed.
		err := n.clean(ctx, trip.id)
		if left = n.Left(); err != nil {
			left = append(left, err.Error())
		}
		if len(left) == 0 || time.Now().After(deadline) {
			break
		}
	}
	if ctx.Err() != nil {
		wrong = append(wrong, fmt.Sprintf("it hangs: not within %v", hangs))
	}
	return append(wrong, left...), failed
}

// clean removes a container, images that were not there before, and what is kept for another pull:
// by leases, which containerd's garbage collector sees, and what a pull has half written.
func (n *node) clean(ctx context.Context, id string) error {
	err := errors.Join(n.c.Remove(ctx, id), n.c.ForgetImages(ctx))
	half, lerr := n.c.Client().ContentStore().ListStatuses(ctx)
	for _, s := range half {
		_ = n.c.Client().ContentStore().Abort(ctx, s.Ref) // it may have ended
	}
	service := n.c.Client().LeasesService()
	_, cerr := service.Create(ctx, leases.WithRandomID()) // so that there is one to delete
	all, aerr := service.List(ctx)
	err = errors.Join(err, lerr, cerr, aerr)
	for _, l := range all {
		if derr := service.Delete(ctx, l, leases.SynchronousDelete); !errdefs.IsNotFound(derr) {
			err = errors.Join(err, derr)
		}
	}
	return err
}

// snapshots returns the snapshots of a containerd.
func (n *node) snapshots(ctx context.Context) (names []string) {
	if err := n.c.Client().SnapshotService(n.c.Snapshotter()).Walk(ctx, func(_ context.Context, i snapshots.Info) error {
		names = append(names, i.Name)
		return nil
	}); err != nil {
		names = append(names, err.Error())
	}
	slices.Sort(names)
	return names
}

// Left returns what a trial has left behind.
func (n *node) Left() (left []string) {
	ctx, cancel := context.WithTimeout(context.Background(), takes)
	defer cancel()
	all, err := n.c.Client().ImageService().List(ctx)
	if err != nil {
		left = append(left, err.Error())
	}
	if len(all) != 1 || all[0].Name != n.image.name || all[0].Target.Digest != n.image.other {
		left = append(left, fmt.Sprintf("the images %v", slices.Collect(func(yield func(string) bool) {
			for _, i := range all {
				_ = yield(i.Name + " " + i.Target.Digest.String())
			}
		})))
	}
	if now := n.snapshots(ctx); !slices.Equal(now, n.kept) {
		left = append(left, fmt.Sprintf("the snapshots %q", now))
	}
	if under, err := n.c.Client().ContentStore().ListStatuses(ctx); err != nil || len(under) > 0 {
		left = append(left, fmt.Sprintf("what is written: %v, %v", under, err))
	}
	containers, err := n.c.Client().Containers(ctx)
	if err != nil || len(containers) > 0 {
		left = append(left, fmt.Sprintf("%d containers, %v", len(containers), err))
	}
	bundles, err := os.ReadDir(filepath.Dir(n.c.Bundle("x")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) || len(bundles) > 0 {
		left = append(left, fmt.Sprintf("the bundles %v, %v", bundles, err))
	}
	for _, pattern := range []string{
		filepath.Join(n.c.Dir(), "root/io.containerd.content.v1.content/gpuckpt-arriving/*"),
		filepath.Join(n.c.Dir(), "root/io.containerd.snapshotter.v1.*/snapshots/*/gpuckpt-arriving.sock*"),
		filepath.Join(n.c.Dumps(), "*"), filepath.Join(n.dir, "*"),
	} {
		found, _ := filepath.Glob(pattern) // the pattern is sound
		left = append(left, found...)
	}
	return left
}

// write writes an OCI archive of the image.
func (n *node) write(file, name string) error {
	var index any = ocispec.Index{Manifests: []ocispec.Descriptor{n.now.Top}}
	if n.now.Top.MediaType == ocispec.MediaTypeImageIndex {
		index = json.RawMessage(n.now.Blobs[n.now.Top.Digest])
	} else {
		index.(ocispec.Index).Manifests[0].Annotations = map[string]string{images.AnnotationImageName: name, ocispec.AnnotationRefName: name}
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	w := tar.NewWriter(f)
	put := func(name string, data []byte) {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(data)), Typeflag: tar.TypeReg}))
		_, werr := w.Write(data)
		err = errors.Join(err, werr)
	}
	put("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	put("index.json", encoded(index))
	blobs := maps.Clone(n.image.blobs)
	maps.Copy(blobs, n.now.Blobs)
	for d, data := range blobs {
		put("blobs/sha256/"+d.Encoded(), data)
	}
	return errors.Join(err, w.Close())
}
