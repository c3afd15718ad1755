// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// smallTmpfs mounts one of that size, until the test ends.
func smallTmpfs(t *testing.T, size string) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// unharmed is a container after a checkpoint that failed: it runs on as before,
// and nothing of the checkpoint is left.
func unharmed(t *testing.T, c *harness.Containerd, k *harness.Container, ref, dumps string) {
	t.Helper()
	if status, err := k.Status(t.Context()); err != nil || status != client.Running {
		t.Fatalf("the container is %q, %v", status, err)
	}
	k.Expect(t, "verify", "bad=0")
	if _, err := c.Client().ImageService().Get(t.Context(), ref); err == nil {
		t.Errorf("there is an image %s", ref)
	}
	if left, _ := filepath.Glob(filepath.Join(dumps, "*")); len(left) > 0 { // the pattern is sound
		t.Errorf("left behind: %q", left)
	}
	leases, err := c.Client().LeasesService().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range leases {
		t.Errorf("a lease is left: %s %v", l.ID, l.Labels)
	}
}

// No room for the dump: the container runs on.
func TestNoRoomForTheDump(t *testing.T) {
	dir := smallTmpfs(t, "16m")
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "7")
	const ref = "gpuckpt.test/job:1"
	fails(t, c, nil, []string{"no space left on device"}, "checkpoint", k.ID, "--image", ref, "--image-path", dir)
	unharmed(t, c, k, ref, dir)
	gpuckpt(t, c, "checkpoint", k.ID, "--image", ref)
}

// A dump is made in memory if that has room, and else in the directory; in either case nothing is left.
func TestDumpInMemory(t *testing.T) {
	c := session.Own(t, harness.Options{})
	dumps := filepath.Join(harness.DiskDir(t), "dumps")
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "7")
	for i, test := range []struct {
		memory string
		want   string // where the GPU state was last
	}{{"0", "disk"}, {"16MiB", "disk"}, {"1GiB", "tmpfs"}} {
		ref := fmt.Sprintf("gpuckpt.test/job:%d", i)
		var kinds []string
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			for {
				select {
				case <-stop:
					return
				case <-time.After(time.Millisecond):
					if found := dumpsOn(dumps); found != "" && !slices.Contains(kinds, found) {
						kinds = append(kinds, found)
					}
				}
			}
		}()
		gpuckpt(t, c, "checkpoint", k.ID, "--image", ref, "--leave-running", "--image-path", dumps, "--in-memory", test.memory)
		close(stop)
		<-ended
		if len(kinds) == 0 || kinds[len(kinds)-1] != test.want {
			t.Errorf("with %s of memory the dump was on %q, want %s", test.memory, kinds, test.want)
		}
		k.Expect(t, "verify", "bad=0")
		if err := c.Client().ImageService().Delete(t.Context(), ref); err != nil {
			t.Fatal(err)
		}
		unharmed(t, c, k, ref, dumps)
	}
}

// So it is with what CRIU dumps, of which nobody knows the size before.
func TestHostMemoryHasNoRoom(t *testing.T) {
	c := session.Own(t, harness.Options{})
	dumps := filepath.Join(harness.DiskDir(t), "dumps")
	for i, workload := range []string{"memory", "gpumemory"} {
		k := start(t, c, harness.RunSpec{}, workload, "--bytes", "50331648")
		ref := fmt.Sprintf("gpuckpt.test/job:%d", i)
		gpuckpt(t, c, "checkpoint", k.ID, "--image", ref, "--leave-running", "--image-path", dumps, "--in-memory", "16MiB")
		k.Expect(t, "verify", "bad=0,0")
		if left, _ := filepath.Glob(filepath.Join(dumps, "*")); len(left) > 0 { // the pattern is sound
			t.Errorf("left behind: %q", left)
		}
		k.MustRemove(t)
	}
}

// dumpsOn returns the kind of file system that a dump's GPU state is on, "" if there is none.
func dumpsOn(dir string) string {
	found, _ := filepath.Glob(filepath.Join(dir, "*", "gpu-*")) // the pattern is sound
	for _, path := range found {
		var st unix.Statfs_t
		switch err := unix.Statfs(path, &st); {
		case err != nil:
		case st.Type == unix.TMPFS_MAGIC:
			return "tmpfs"
		default:
			return "disk"
		}
	}
	return ""
}

// No room for the image in containerd's store: the container runs on, and there
// is no image, with both kinds of checkpoint.
func TestNoRoomForTheImage(t *testing.T) {
	dumps := t.TempDir()
	t.Setenv("GPUCKPT_TEST_DIR", smallTmpfs(t, "150m"))
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "201326592", "--seed", "7")
	const ref = "gpuckpt.test/job:1"
	args := []string{"checkpoint", k.ID, "--image", ref, "--image-path", dumps}
	fails(t, c, nil, []string{"no space left on device"}, args...)
	unharmed(t, c, k, ref, dumps)
	fails(t, c, nil, []string{"no space left on device"}, append(args, "--leave-running")...)
	unharmed(t, c, k, ref, dumps)
}

// slowCheckpoint begins a checkpoint whose driver needs three seconds, and returns when the container is paused.
func slowCheckpoint(t *testing.T, c *harness.Containerd, k *harness.Container, ref string) (cmd *exec.Cmd, errs *bytes.Buffer) {
	t.Helper()
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be slow on demand")
	}
	if err := c.SetSoftwareGPU("checkpoint_delay_ms=3000"); err != nil {
		t.Fatal(err)
	}
	errs = new(bytes.Buffer)
	cmd = command(t.Context(), t, c, nil, "checkpoint", k.ID, "--image", ref)
	cmd.Stderr = errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		if status, err := k.Status(t.Context()); err == nil && status == client.Paused {
			return cmd, errs
		}
		if time.Now().After(deadline) {
			t.Fatal("the container was never paused")
		}
	}
}

// Whoever presses Ctrl-C has the container as it was.
func TestInterruptedCheckpoint(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "7")
	const ref = "gpuckpt.test/job:1"
	cmd, errs := slowCheckpoint(t, c, k, ref)
	if err := cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(errs.String(), "interrupted") || strings.Contains(errs.String(), "context") {
		t.Errorf("gpuckpt ended with %v and %s", err, errs)
	}
	if err := c.SetSoftwareGPU(""); err != nil {
		t.Fatal(err)
	}
	unharmed(t, c, k, ref, c.Dumps())
	gpuckpt(t, c, "checkpoint", k.ID, "--image", ref)
}

// Whoever kills the container meanwhile is told so, and not to resume it.
func TestKilledInACheckpoint(t *testing.T) {
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "7")
	cmd, errs := slowCheckpoint(t, c, k, "gpuckpt.test/job:1")
	if _, err := c.Ctr(t.Context(), "tasks", "kill", "--signal", "SIGKILL", k.ID); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(errs.String(), "the container has ended meanwhile") || strings.Contains(errs.String(), "resume") {
		t.Errorf("gpuckpt ended with %v and %s", err, errs)
	}
	if left, _ := filepath.Glob(filepath.Join(c.Dumps(), "*")); len(left) > 0 { // the pattern is sound
		t.Errorf("left behind: %q", left)
	}
}

// containerd is restarted: at the begin of a dump, which fails, if it was under way, and the container runs on; while
// the image is made and the GPU is given back, and all is done when containerd is there again.
func TestContainerdRestarted(t *testing.T) {
	if gpu.Kind != harness.SoftwareGPU {
		t.Skip("only the software GPU can be slow on demand")
	}
	c := session.Own(t, harness.Options{})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--seed", "7")
	take := func(ref string, leaveRunning bool, meanwhile func()) error {
		own, err := client.New(c.Address())
		if err != nil {
			return err
		}
		defer own.Close()
		_, err = capture.Containers(namespaces.WithNamespace(t.Context(), c.Namespace()), own,
			[]capture.Target{{ID: k.ID, Image: ref, Made: func(ocispec.Descriptor) { meanwhile() }}},
			capture.Options{Dir: c.Dumps(), LeaveRunning: leaveRunning})
		return err
	}
	restart := func() {
		if err := c.Restart(t.Context()); err != nil {
			t.Error(err)
		}
	}

	undo := c.SoftwareGPU(t, "checkpoint_delay_ms=5000")
	const dumped = "gpuckpt.test/job:dump"
	answered := make(chan error, 1)
	go func() { answered <- take(dumped, true, func() {}) }()
	for status, err := k.Status(t.Context()); err != nil || status != client.Paused; status, err = k.Status(t.Context()) {
		select {
		case err := <-answered:
			t.Fatalf("before the dump: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	restart()
	undo()
	switch err := <-answered; {
	case err == nil: // it was asked for when containerd was there again
		k.Expect(t, "verify", "bad=0")
		gpuckpt(t, c, "image", "verify", dumped)
	case errdefs.IsUnavailable(err):
		unharmed(t, c, k, dumped, c.Dumps())
	default:
		t.Errorf("in the dump: %v", err)
	}

	undo = c.SoftwareGPU(t, "restore_delay_ms=2000")
	for _, leaveRunning := range []bool{true, false} {
		ref := fmt.Sprintf("gpuckpt.test/job:%t", leaveRunning)
		if err := take(ref, leaveRunning, sync.OnceFunc(restart)); err != nil {
			t.Errorf("where it runs on: %t: %v", leaveRunning, err)
		}
		if leaveRunning {
			k.Expect(t, "verify", "bad=0")
			undo()
		}
		gpuckpt(t, c, "image", "verify", ref)
	}
}

// A container that was paused stays so, and an image keeps its name: no checkpoint takes it, nor
// anything else that makes an image.
func TestPausedContainerStaysPaused(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	const ref = "gpuckpt.test/paused:1"
	if _, err := shared.Ctr(t.Context(), "tasks", "pause", k.ID); err != nil {
		t.Fatal(err)
	}
	gpuckpt(t, shared, "checkpoint", k.ID, "--image", ref, "--leave-running")
	if status, err := k.Status(t.Context()); err != nil || status != client.Paused {
		t.Fatalf("the container is %q, %v", status, err)
	}
	if _, err := shared.Ctr(t.Context(), "tasks", "resume", k.ID); err != nil {
		t.Fatal(err)
	}
	k.Expect(t, "next", "102")
	first := asJSON[struct{ Image struct{ Digest string } }](t, shared, "image", "inspect", ref).Image.Digest
	fails(t, shared, nil, []string{"no image gpuckpt.test/nothing:1"}, "checkpoint", k.ID, "--image", ref, "--previous", "gpuckpt.test/nothing:1")
	taken := []string{"belongs to another image", first, "images rm " + ref}
	fails(t, shared, nil, taken, "checkpoint", k.ID, "--image", ref, "--previous", ref)
	k.Expect(t, "next", "103") // it was not touched
	const second = "gpuckpt.test/paused:second"
	made := asJSON[harness.CheckpointAnswer](t, shared, "checkpoint", k.ID, "--image", second, "--previous", ref)
	dir := t.TempDir()
	gpuckpt(t, shared, "image", "convert", second, "oci:"+dir)
	gpuckpt(t, shared, "image", "convert", "oci:"+dir, second) // the same image
	fails(t, shared, nil, taken, "image", "convert", "oci:"+dir, ref)
	gpuckpt(t, shared, "image", "convert", second, "kubernetes-archive:"+filepath.Join(dir, "archive"))
	fails(t, shared, nil, taken, "image", "build", "kubernetes-archive:"+filepath.Join(dir, "archive"), ref)
	if now := asJSON[struct{ Image struct{ Digest string } }](t, shared, "image", "inspect", ref).Image.Digest; now != first || now == made.Digest {
		t.Errorf("the image was %s, is %s, and the other %s", first, now, made.Digest)
	}
	k.MustRemove(t)
	r := resume(t, shared, second, k.Port)
	r.Expect(t, "next", "104")
	// The checkpoint of what came from a checkpoint image is one again.
	const later = "gpuckpt.test/paused:2"
	gpuckpt(t, shared, "checkpoint", r.ID, "--image", later, "--previous", second)
	r.MustRemove(t)
	r = resume(t, shared, later, k.Port)
	r.Expect(t, "next", "105")
}

func TestCheckpointRefuses(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "counter")
	const ref = "gpuckpt.test/refused:1"
	fails(t, shared, nil, []string{"no such container", "gpuckpt ps --all --all-namespaces"}, "checkpoint", "nobody", "--image", ref)
	fails(t, shared, nil, []string{"not a full image name"}, "checkpoint", k.ID, "--image", "job")
	fails(t, shared, nil, []string{"[image push] is required"}, "checkpoint", k.ID)
	fails(t, shared, nil, []string{"zstd, gzip or none"}, "checkpoint", k.ID, "--image", ref, "--compression", "zip")
	fails(t, shared, nil, []string{"make the directory"}, "checkpoint", k.ID, "--image", ref, "--image-path", "/proc/none")
	fails(t, shared, nil, []string{"make the directory"}, "checkpoint", k.ID, "--image", ref, "--image-path", filepath.Join(t.TempDir(), "none/dumps"))
	fails(t, shared, nil, []string{"compression level 99"}, "checkpoint", k.ID, "--image", ref, "--level", "99")
	fails(t, shared, []string{"CONTAINERD_ADDRESS=/nonexistent.sock"}, []string{"/nonexistent.sock", "--address"}, "image", "inspect", ref)
	k.Expect(t, "next", "101")
	runc := start(t, shared, harness.RunSpec{ID: harness.Name(t) + "-runc", Runtime: harness.RuncRuntime}, "counter")
	fails(t, shared, nil, []string{"its runtime is containerd-shim-runc-v2, not gpuckpt's", "runtimeClassName: gpuckpt"}, "checkpoint", runc.ID, "--image", ref)
	// The image that the container was made from has another meaning by now.
	if err := shared.Client().ImageService().Delete(t.Context(), harness.WorkloadImage); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := shared.ImportWorkload(session.Context()); err != nil {
			t.Error(err)
		}
	})
	fails(t, shared, nil, []string{harness.WorkloadImage, "is needed"}, "checkpoint", k.ID, "--image", ref)
	k.Expect(t, "next", "102")
}

// A dump in a directory is restored with its base image, and becomes an image.
func TestDumpInADirectory(t *testing.T) {
	k := start(t, shared, harness.RunSpec{}, "counter")
	k.Expect(t, "next", "101")
	dir := t.TempDir()
	if _, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: dir, Exit: true}); err != nil {
		t.Fatal(err)
	}
	k.MustRemove(t)
	gpuckpt(t, shared, "image", "verify", dir)
	args := []string{"restore", dir, "--name", "dumped", "--net-host", "--gpus", "0", "--cdi-spec-dirs", cdiSpec(t, shared), "--snapshotter", shared.Snapshotter()}
	fails(t, shared, nil, []string{"--base"}, args...)
	gpuckpt(t, shared, append(args, "--base", harness.WorkloadImage)...)
	r := adopt(t, shared, "dumped", k.Port)
	r.Expect(t, "next", "102")
	r.MustRemove(t)

	const ref = "gpuckpt.test/dumped:1"
	fails(t, shared, nil, []string{"--base"}, "image", "build", dir, ref)
	gpuckpt(t, shared, "image", "build", dir, ref, "--base", harness.WorkloadImage)
	again := resume(t, shared, ref, k.Port)
	again.Expect(t, "next", "102")
	again.MustRemove(t)

	// The signature is looked at before anything is parsed.
	metadata := filepath.Join(dir, "gpuckpt.json")
	was, err := os.ReadFile(metadata)
	if err == nil {
		err = os.WriteFile(metadata, []byte("{"), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	fails(t, shared, nil, []string{"gpuckpt.json", "it is not what was signed"}, append(args, "--base", harness.WorkloadImage)...)
	if err := os.WriteFile(metadata, was, 0o600); err != nil {
		t.Fatal(err)
	}
	// A restore that fails leaves no container.
	if err := os.Truncate(filepath.Join(dir, "inventory.img"), 0); err != nil {
		t.Fatal(err)
	}
	fails(t, shared, nil, []string{"restore " + dir}, append(args, "--base", harness.WorkloadImage)...)
	if list, err := shared.Client().Containers(t.Context()); err != nil || len(list) > 0 {
		t.Errorf("containers left: %v, %v", list, err)
	}
}
