// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// blobPath is where containerd has a blob.
func blobPath(c *harness.Containerd, d string) string {
	return filepath.Join(c.Dir(), "root/io.containerd.content.v1.content/blobs/sha256", digest.Digest(d).Encoded())
}

// stockPull pulls the image with ctr.
func (r *away) stockPull(t *testing.T) {
	t.Helper()
	if _, err := r.c.Ctr(t.Context(), "images", "pull", "--plain-http", "--snapshotter", r.c.Snapshotter(), r.name); err != nil {
		t.Fatalf("%v\n%s", err, r.c.LogTail(3000))
	}
}

// nothingArrives expects that of what arrives nothing is left.
func nothingArrives(t *testing.T, c *harness.Containerd) {
	t.Helper()
	for _, pattern := range []string{"io.containerd.content.v1.content/gpuckpt-arriving/*", "io.containerd.snapshotter.v1.*/snapshots/*/gpuckpt-arriving.sock*"} {
		found, err := filepath.Glob(filepath.Join(c.Dir(), "root", pattern))
		if err != nil || len(found) > 0 {
			t.Errorf("left are %q, %v", found, err)
		}
	}
	kept, err := c.Client().LeasesService().List(t.Context())
	if err != nil || len(kept) > 0 {
		t.Errorf("leases are left: %v, %v", kept, err)
	}
	half, err := c.Client().ContentStore().ListStatuses(t.Context())
	if err != nil || len(half) > 0 {
		t.Errorf("what is written: %v, %v", half, err)
	}
}

// mapped returns the files of blobs that a process has mapped, of those named.
func mapped(pid int, blobs map[string]bool) (found []string) {
	maps, _ := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	for line := range strings.Lines(string(maps)) {
		f := strings.Fields(line)
		if len(f) > 5 && blobs[f[4]] {
			found = append(found, f[4])
		}
	}
	return found
}

// A damaged blob comes again by what docs/troubleshooting.md says, also where another image has it, or another namespace.
func TestDamagedBlobComesAgain(t *testing.T) {
	r := sent(t)
	const other = "gpuckpt.test/other:1"
	ctr := func(args ...string) {
		t.Helper()
		if _, err := r.c.Ctr(t.Context(), args...); err != nil {
			t.Fatal(err)
		}
	}
	gpuckpt(t, r.c, "image", "pull", "--no-unpack", r.name)
	ctr("images", "tag", r.name, other)
	gpuckpt(t, r.c, "image", "pull", "--no-unpack", "--namespace", "elsewhere", r.name)
	blob := r.gpu[0].Digest
	f, err := os.OpenFile(blobPath(r.c, blob), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteAt([]byte("damage"), 4096)
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	fails(t, r.c, nil, []string{"is damaged", blob}, "image", "verify", r.name)
	ctr("content", "rm", blob)
	gpuckpt(t, r.c, "rm", r.name)
	gpuckpt(t, r.c, "image", "pull", "--no-unpack", r.name)
	gpuckpt(t, r.c, "image", "verify", r.name)
	gpuckpt(t, r.c, "image", "verify", other)
	gpuckpt(t, r.c, "image", "verify", "--namespace", "elsewhere", r.name)
}

// A stock client pulls and runs an image. The disk has GPU state once, as the blobs that ctr has pulled, and these
// are what a restore maps. What runs needs them no more; without them it is not started again.
func TestStockClient(t *testing.T) {
	r := sent(t)
	r.stockPull(t)
	inodes := make(map[string]bool)
	for _, b := range r.gpu {
		st, err := os.Stat(blobPath(r.c, b.Digest))
		if err != nil {
			t.Fatal(err)
		}
		inodes[strconv.FormatUint(st.Sys().(*syscall.Stat_t).Ino, 10)] = true
	}
	seen := make(map[string]bool)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
			}
			processes, _ := filepath.Glob("/proc/[0-9]*")
			for _, p := range processes {
				pid, _ := strconv.Atoi(filepath.Base(p))
				for _, inode := range mapped(pid, inodes) {
					seen[inode] = true
				}
			}
		}
	}()
	k := resume(t, r.c, r.name, r.port)
	close(stop)
	<-ended
	if len(seen) == 0 {
		t.Error("no process had a blob of GPU state mapped")
	}
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	var used int64
	err := filepath.WalkDir(filepath.Join(r.c.Dir(), "root", "io.containerd.snapshotter.v1."+r.c.Snapshotter()), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !strings.Contains(path, "/"+images.ImageDir+"/") {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if images.IsAreaFile(d.Name()) {
			used += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return nil
	})
	if err != nil || used > 1<<20 {
		t.Errorf("the snapshots have %d bytes of GPU state: %v", used, err)
	}

	if _, err := r.c.Ctr(t.Context(), "images", "rm", "--sync", r.name); err != nil {
		t.Fatal(err)
	}
	for _, b := range r.gpu {
		if _, err := os.Stat(blobPath(r.c, b.Digest)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("without its image blob %s is kept: %v", b.Digest, err)
		}
	}
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "103")
	if err := k.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.c.Ctr(t.Context(), "tasks", "delete", k.ID); err != nil {
		t.Fatal(err)
	}
	err = k.Start(t.Context())
	harness.Says(t, err, "which has memory or GPU state, is not in", "gpuckpt image pull")
	if !slices.ContainsFunc(r.gpu, func(b blob) bool { return strings.Contains(fmt.Sprint(err), b.Digest) }) {
		t.Errorf("the error names no blob: %v", err)
	}
	// The image again, and it starts from its checkpoint.
	r.stockPull(t)
	if err := k.Start(t.Context()); err != nil {
		t.Fatalf("%v\n%s", err, r.c.LogTail(3000))
	}
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	k.MustRemove(t)
	nothingArrives(t, r.c)
}

// Of two restores of an image at once one fetches it, for both.
func TestTwoArrivals(t *testing.T) {
	c := session.Own(t, harness.Options{})
	s := serve(t, false)
	k := c.Work(t, harness.RunSpec{OwnNetwork: true, GPUs: []int{0}}, "pattern", "--bytes", "104857600", "--seed", "7")
	asks := func(k *harness.Container, port int, question string) string {
		out := ""
		harness.Within(t, k.ID+" answers", func() (ok bool) {
			answer, err := k.Exec(t.Context(), "gpuwork", "send", fmt.Sprint("127.0.0.1:", port), question)
			out = strings.TrimSpace(answer)
			return err == nil
		})
		return out
	}
	asks(k, k.Port, "info")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", ref)
	k.MustRemove(t)
	gpuckpt(t, c, "image", "push", ref)
	forget(t, c)
	s.fetched.Store(0)
	var said [2]strings.Builder
	var both []*exec.Cmd
	for i := range said {
		cmd := command(t.Context(), t, c, nil, "restore", ref, "--pull", "--name", strconv.Itoa(i), "--gpus", "0", "--cdi-spec-dirs", cdiSpec(t, c), "--snapshotter", c.Snapshotter())
		cmd.Stderr = &said[i]
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		both = append(both, cmd)
	}
	for i, cmd := range both {
		if err := cmd.Wait(); err != nil {
			t.Errorf("restore %d: %v: %s", i, err, said[i].String())
			continue
		}
		again := adopt(t, c, strconv.Itoa(i), 0)
		if got := asks(again, k.Port, "verify"); got != "bad=0" {
			t.Errorf("restore %d: %s", i, got)
		}
		again.MustRemove(t)
	}
	// Layers and documents may be fetched by both.
	if got := s.fetched.Load(); got > int64(made.Bytes)*5/4 {
		t.Errorf("%d bytes were fetched of an image of %d", got, made.Bytes)
	}
	nothingArrives(t, c)
}

// A restore that is killed while GPU state arrives is in nobody's way: neither in that of a stock client nor in that
// of the next restore, which removes what is left and fetches only what is missing.
func TestKilledArrival(t *testing.T) {
	r := sent(t)
	last := len(r.gpu) - 1
	kill := func(id string) {
		t.Helper()
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
		cmd := command(t.Context(), t, r.c, nil, r.args(id)...)
		var errs strings.Builder
		cmd.Stderr = &errs
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		select {
		case <-waits:
		case err := <-ended:
			t.Fatalf("it has not waited for a blob: %v: %s", err, errs.String())
		}
		r.begins(t, id)
		harness.Within(t, "the other blobs are here", func() bool {
			for _, b := range r.gpu[:last] {
				if !has(t, r.c, b.Digest) {
					return false
				}
			}
			return true
		})
		_ = cmd.Process.Kill()
		<-ended
		r.meddle.Store(nil)
		// Until its shim has given up, containerd does not answer for it.
		harness.Within(t, id+" can be removed", func() bool { return r.c.Adopt(id, r.port).Remove(t.Context()) == nil })
	}
	kill("killed")
	before := r.fetched.Load()
	gpuckpt(t, r.c, r.args("after")...)
	r.goesOn(t, "after")
	if got := r.fetched.Load() - before; got > r.gpu[last].Bytes*5/4 {
		t.Errorf("%d bytes were fetched, and only a blob of %d was missing", got, r.gpu[last].Bytes)
	}
	// The lease of who was killed is left, for a day: nobody knows whether it was.
	service := r.c.Client().LeasesService()
	left, err := service.List(t.Context())
	if err != nil || len(left) != 1 {
		t.Fatalf("the leases are %v, %v", left, err)
	}
	if until, err := time.Parse(time.RFC3339, left[0].Labels["containerd.io/gc.expire"]); err != nil || time.Until(until) > 24*time.Hour {
		t.Errorf("the lease %+v stays: %v", left[0], err)
	}
	if err := service.Delete(t.Context(), left[0], leases.SynchronousDelete); err != nil {
		t.Fatal(err)
	}
	nothingArrives(t, r.c)

	forget(t, r.c)
	kill("killed-again")
	r.stockPull(t)
	k := resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	k.MustRemove(t)
}

// An image goes into a layout, an archive, a Kubernetes archive and back with its blobs, and what looks at images
// knows them.
func TestBlobsEverywhere(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "201326592", "--chunks", "3", "--seed", "9")
	k.Expect(t, "count", "101")
	const first, second = "gpuckpt.test/blobs:1", "gpuckpt.test/blobs:2"
	gpuckpt(t, c, "checkpoint", k.ID, "--image", first, "--leave-running")
	again := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", second, "--previous", first)
	k.MustRemove(t)
	if again.GPUReusedBytes == 0 || again.GPUWrittenBytes > again.GPUReusedBytes {
		t.Errorf("of an unchanged program blobs were written: %+v", again)
	}
	dir := t.TempDir()
	layout, archive, kube := filepath.Join(dir, "layout"), filepath.Join(dir, "job.tar"), filepath.Join(dir, "kube.tar")
	gpuckpt(t, c, "image", "convert", second, "oci:"+layout)
	gpuckpt(t, c, "image", "convert", layout, "oci-archive:"+archive)
	gpuckpt(t, c, "image", "convert", archive, "kubernetes-archive:"+kube)
	for _, at := range []string{layout, archive, kube} {
		gpuckpt(t, c, "image", "verify", at)
		if out := gpuckpt(t, c, "image", "inspect", at); !strings.Contains(out, "Process 1") {
			t.Errorf("gpuckpt image inspect %s printed %s", at, out)
		}
	}
	if !slices.ContainsFunc(namesIn(t, kube), func(name string) bool { return images.IsAreaFile(filepath.Base(name)) }) {
		t.Error("the Kubernetes archive has no GPU state")
	}

	gpuckpt(t, c, "prune", "--keep", "1")
	if out := gpuckpt(t, c, "ls"); strings.Contains(out, first) || !strings.Contains(out, second) {
		t.Errorf("gpuckpt ls prints %s", out)
	}
	r := resume(t, c, second, k.Port) // blobs of both images are kept
	r.Expect(t, "verify", "bad=0")
	r.MustRemove(t)
	forget(t, c)
	for source, name := range map[string]string{archive: "gpuckpt.test/from-archive:1", kube: "gpuckpt.test/from-kube:1"} {
		command := "convert"
		if source == kube {
			command = "build"
		}
		gpuckpt(t, c, "image", command, source, name)
		r := resume(t, c, name, k.Port)
		r.Expect(t, "verify", "bad=0")
		r.Expect(t, "count", "102")
		r.MustRemove(t)
	}
}

// Where layers are not put together afterwards CRIU's layer is unpacked by us as well, and an image is pulled whole.
func TestBlobsNative(t *testing.T) {
	r := sentBy(t, session.Own(t, harness.Options{Snapshotter: "native"}))
	gpuckpt(t, r.c, "image", "pull", r.name, "--snapshotter", "native")
	k := resume(t, r.c, r.name, r.port)
	k.Expect(t, "verify", "bad=0")
	k.Expect(t, "count", "102")
	k.MustRemove(t)
	forget(t, r.c)
	gpuckpt(t, r.c, r.args("native")...)
	r.goesOn(t, "native")
	nothingArrives(t, r.c)
}

// An image may say of any blob on the node that it has its GPU state. The digests in gpuckpt.json tell: the container
// does not run.
func TestForeignBlob(t *testing.T) {
	c := session.Own(t, harness.Options{})
	names := []string{"gpuckpt.test/mine:1", "gpuckpt.test/yours:1"}
	var port int
	for i, name := range names {
		k := start(t, c, harness.RunSpec{ID: "job-" + strconv.Itoa(i), Port: port}, "pattern", "--bytes", "50331648", "--seed", strconv.Itoa(7+i))
		gpuckpt(t, c, "checkpoint", k.ID, "--image", name)
		k.MustRemove(t)
		port = k.Port
	}
	yours := pointersOf(t, c, names[1])
	var theirs []string
	other, err := c.Client().ImageService().Get(t.Context(), names[1])
	if err != nil {
		t.Fatal(err)
	}
	inspected, err := oci.Inspect(t.Context(), c.Client().ContentStore(), other.Target)
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range inspected.Metadata.Areas() {
		theirs = append(theirs, a.Digests...)
	}
	refused := func(what, name string, words ...string) {
		t.Helper()
		k, err := c.TryWork(t, harness.RunSpec{
			ID: "refused", Image: name, Port: port, GPUs: []int{0}, Args: []string{"gpuwork"}, Annotations: map[string]string{"dev.gpuckpt.restore": "true"},
		})
		if err == nil {
			t.Errorf("%s: it runs: %s", what, k.Answer(t, "verify"))
			k.MustRemove(t)
			return
		}
		t.Logf("%s: %v", what, err)
		harness.Says(t, err, words...)
		for _, d := range theirs {
			if strings.Contains(err.Error(), d) {
				t.Errorf("%s: the error tells a digest of the other image's blocks: %v", what, err)
			}
		}
		if status, serr := c.Adopt("refused", port).Status(t.Context()); serr == nil && status == "running" {
			t.Errorf("%s: the container is running", what)
		}
		c.Adopt("refused", port).MustRemove(t)
	}
	repoint(t, c, names[0], "gpuckpt.test/foreign:1", func(mine map[string]images.Pointer) map[string]string {
		made := make(map[string]string)
		if len(mine) != len(yours) {
			t.Fatalf("the images are not alike: %v, %v", mine, yours)
		}
		for name := range mine {
			made[name] = yours[name].String()
		}
		return made
	})
	refused("another image's blob", "gpuckpt.test/foreign:1", "digest")
	for n, text := range []string{"sha256:../../../../../../etc/passwd 2097152\n", "sha256:" + strings.Repeat("../", 21) + "x 2097152\n"} {
		name := fmt.Sprintf("gpuckpt.test/leads-out:%d", n)
		repoint(t, c, names[0], name, func(mine map[string]images.Pointer) map[string]string {
			made := make(map[string]string)
			for file := range mine {
				made[file] = text
			}
			return made
		})
		refused(text, name, "nor says which blob")
	}
	// A link where a blob was.
	mine := pointersOf(t, c, names[0])
	name := slices.Sorted(maps.Keys(mine))[0]
	path, elsewhere := blobPath(c, mine[name].Digest.String()), blobPath(c, yours[name].Digest.String())
	if err := errors.Join(os.Rename(path, path+".gone"), os.Symlink(elsewhere, path)); err != nil {
		t.Fatal(err)
	}
	refused("a link", names[0], "is no file of")
	if err := os.Rename(path+".gone", path); err != nil {
		t.Fatal(err)
	}
	k := resume(t, c, names[0], port)
	k.Expect(t, "verify", "bad=0")
	k.MustRemove(t)
}

// manifestOf reads an image's manifest and config.
func manifestOf(t *testing.T, c *harness.Containerd, name string) (m ocispec.Manifest, config ocispec.Image) {
	t.Helper()
	image, err := c.Client().ImageService().Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	for _, of := range []struct {
		d  func() ocispec.Descriptor
		to any
	}{{func() ocispec.Descriptor { return image.Target }, &m}, {func() ocispec.Descriptor { return m.Config }, &config}} {
		data, err := content.ReadBlob(t.Context(), c.Client().ContentStore(), of.d())
		if err := errors.Join(err, json.Unmarshal(data, of.to)); err != nil {
			t.Fatal(err)
		}
	}
	return m, config
}

// pointersOf reads an image's layer of pointers.
func pointersOf(t *testing.T, c *harness.Containerd, name string) map[string]images.Pointer {
	t.Helper()
	m, _ := manifestOf(t, c, name)
	at := slices.IndexFunc(m.Layers, func(l ocispec.Descriptor) bool { return l.Annotations[annotations.Layer] == oci.LayerIndex })
	if at < 0 {
		t.Fatalf("%s has no index: %+v", name, m.Layers)
	}
	layer, err := oci.OpenLayer(t.Context(), c.Client().ContentStore(), m.Layers[at], nil)
	if err != nil {
		t.Fatal(err)
	}
	defer layer.Close()
	found := make(map[string]images.Pointer)
	for r := tar.NewReader(layer); ; {
		h, err := r.Next()
		if err != nil {
			return found
		}
		var text bytes.Buffer
		if _, err := text.ReadFrom(r); err != nil {
			t.Fatal(err)
		}
		if h.Typeflag == tar.TypeReg {
			if found[filepath.Base(h.Name)], err = images.ParsePointer(text.String()); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// repoint makes an image like another one, with other pointers, and unpacks it.
func repoint(t *testing.T, c *harness.Containerd, of, name string, to func(map[string]images.Pointer) map[string]string) {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: images.ImageDir + "/", Mode: 0o700})
	for file, text := range to(pointersOf(t, c, of)) {
		err = errors.Join(err, w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: images.ImageDir + "/" + file, Mode: 0o600, Size: int64(len(text))}))
		_, werr := w.Write([]byte(text))
		err = errors.Join(err, werr)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	ctx, done, err := c.Client().WithLease(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = done(ctx) }()
	write := func(mediaType string, data []byte, opts ...content.Opt) ocispec.Descriptor {
		d := ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(data), Size: int64(len(data))}
		if err := content.WriteBlob(ctx, c.Client().ContentStore(), name+d.Digest.String(), bytes.NewReader(data), d, opts...); err != nil {
			t.Fatal(err)
		}
		return d
	}
	encoded := func(v any) []byte {
		data, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	m, config := manifestOf(t, c, of)
	at := slices.IndexFunc(m.Layers, func(l ocispec.Descriptor) bool { return l.Annotations[annotations.Layer] == oci.LayerIndex })
	layer := write(ocispec.MediaTypeImageLayer, b.Bytes())
	layer.Annotations = m.Layers[at].Annotations
	m.Layers[at], config.RootFS.DiffIDs[at] = layer, layer.Digest
	m.Config = write(ocispec.MediaTypeImageConfig, encoded(config))
	manifest := write(ocispec.MediaTypeImageManifest, encoded(m), content.WithLabels(oci.References(&m)))
	if _, err := c.Client().ImageService().Create(ctx, cimages.Image{Name: name, Target: manifest}); err != nil {
		t.Fatal(err)
	}
	image, err := c.Client().GetImage(ctx, name)
	if err != nil {
		t.Fatal(err)
	}
	if err := image.Unpack(ctx, c.Snapshotter()); err != nil {
		t.Fatal(err)
	}
}
