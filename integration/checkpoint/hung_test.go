// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/binary"
	"fmt"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Requests of FUSE that a server must answer for an empty directory (linux/fuse.h), and the sizes of the
// answers.
const (
	fuseGetattr, fuseAttrOut  = 3, 104
	fuseStatfs, fuseStatfsOut = 17, 80
	fuseInit, fuseInitOut     = 26, 64
	fuseHead, fuseOutHead     = 40, 16
)

// serveFUSE mounts an empty file system whose server answers until it hangs.
func serveFUSE(t *testing.T) (dir string, hangs *atomic.Bool) {
	t.Helper()
	dir, hangs = t.TempDir(), new(atomic.Bool)
	dev, err := os.OpenFile("/dev/fuse", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("this machine has no FUSE: %v", err)
	}
	t.Cleanup(func() { dev.Close() })
	fd := int(dev.Fd())
	if err := unix.Mount("hung-server", dir, "fuse", 0, fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", fd)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	go func() {
		request := make([]byte, 1<<20)
		for {
			n, err := unix.Read(fd, request)
			if err == unix.EINTR || err == unix.EAGAIN {
				continue
			}
			if err != nil || n < fuseHead {
				return // it is unmounted
			}
			for hangs.Load() {
				time.Sleep(10 * time.Millisecond)
			}
			answer := make([]byte, fuseOutHead)
			copy(answer[8:], request[8:16])
			switch binary.NativeEndian.Uint32(request[4:]) {
			case fuseInit:
				out := make([]byte, fuseInitOut)
				binary.NativeEndian.PutUint32(out, 7)
				binary.NativeEndian.PutUint32(out[4:], 31)
				binary.NativeEndian.PutUint32(out[20:], 4096)
				answer = append(answer, out...)
			case fuseGetattr:
				out := make([]byte, fuseAttrOut)
				binary.NativeEndian.PutUint64(out[16:], 1)
				binary.NativeEndian.PutUint32(out[76:], unix.S_IFDIR|0o755)
				binary.NativeEndian.PutUint32(out[80:], 2)
				answer = append(answer, out...)
			case fuseStatfs:
				answer = append(answer, make([]byte, fuseStatfsOut)...)
			default:
				binary.NativeEndian.PutUint32(answer[4:], ^uint32(unix.ENOSYS)+1)
			}
			binary.NativeEndian.PutUint32(answer, uint32(len(answer)))
			if _, err := unix.Write(fd, answer); err != nil && err != unix.ENOENT {
				return
			}
		}
	}()
	return dir, hangs
}

// A checkpoint of a container with a file system whose server hangs is refused, by its name, within
// seconds. The program never stands still. When the server goes on, the checkpoint is made.
func TestHungFileSystem(t *testing.T) {
	results.Add(t)
	for name, spec := range map[string]harness.RunSpec{"plain": {}, "GPU": {GPUs: []int{0}}} {
		t.Run(name, func(t *testing.T) {
			dir, hangs := serveFUSE(t)
			spec.Mounts = []specs.Mount{{Type: "bind", Source: dir, Destination: "/served", Options: []string{"rbind", "ro"}}}
			work := "plain"
			if len(spec.GPUs) > 0 {
				work = "counter"
			}
			k := shared.Work(t, spec, work)
			count := number(t, k.Answer(t, "count"))
			hangs.Store(true)
			t.Cleanup(func() { hangs.Store(false) })
			for range 2 { // what was asked before has not answered either
				began := time.Now()
				_, err := k.CheckpointTask(t.Context(), harness.TaskCheckpoint{ImagePath: t.TempDir()})
				harness.Says(t, err, "the file system at /served", "hung-server", "does not answer")
				if took := time.Since(began); took > 30*time.Second {
					t.Errorf("the refusal took %v", took)
				}
				isPaused(t, k, false)
				count++
				if got := number(t, k.Answer(t, "count")); got != count {
					t.Errorf("it counts %d, want %d", got, count)
				}
			}
			hangs.Store(false)
			ref := takeCheckpoint(t, shared, k, "1")
			k.MustRemove(t)
			k = restore(t, shared, k.ID, ref, k.Port)
			if got := number(t, k.Answer(t, "count")); got != count+1 {
				t.Errorf("restored it counts %d, want %d", got, count+1)
			}
		})
	}
}
