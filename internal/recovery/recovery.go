// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package recovery undoes what an operation on a container has left whose shim has died, by the
// record that package journal keeps.
//
// What can be done depends on who is left:
//
//   - The shim lives: it undoes by itself, or waits to be asked again. Nothing is done here.
//   - The container lives, and its shim does not: that is so as long as no containerd runs, since
//     containerd ends a container without a shim. The container is let go: CRIU is ended, the cgroup
//     thawed, CUDA processes are unlocked. One whose GPU state was out of its processes cannot go on.
//   - The container has ended too: what is left is files, directories and mounts. They are removed.
//
// A checkpoint that is complete is never removed.
package recovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/log"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/gpu/interposer"
	"github.com/gpuckpt/gpuckpt/internal/gpu/staging"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/driverroot"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
	"github.com/gpuckpt/gpuckpt/internal/operation/journal"
)

// Report is what became of one record.
type Report struct {
	Namespace string `json:"namespace"`
	Container string `json:"container"`
	// Operation and Step are where the container was, "checkpoint" and "dump".
	Operation string `json:"operation"`
	Step      string `json:"step,omitempty"`
	// Done is what was undone, ToDo what a person must do. Both empty: nothing was left.
	Done []string `json:"done,omitempty"`
	ToDo []string `json:"toDo,omitempty"`
}

func (r *Report) did(format string, args ...any) {
	r.Done = append(r.Done, fmt.Sprintf(format, args...))
}
func (r *Report) todo(format string, args ...any) {
	r.ToDo = append(r.ToDo, fmt.Sprintf(format, args...))
}

// Recover does what can be done about a record, and removes it when nothing is left to do. An error
// means that something failed; what was done before is in the report.
//
// kill says that a container which cannot go on is ended.
func Recover(ctx context.Context, node config.Node, path string, kill bool) (Report, error) {
	rec, err := journal.Read(path)
	if errors.Is(err, journal.ErrEmpty) {
		return Report{}, journal.Remove(path)
	}
	if err != nil {
		return Report{}, err
	}
	r := Report{Namespace: rec.Namespace, Container: rec.Container, Operation: rec.Operation, Step: rec.Step}
	here, err := runs(rec)
	if err != nil {
		return r, err
	}
	switch {
	case here && rec.Shim.Lives():
		r.waits(rec)
		return r, nil
	case here && rec.Init.Lives():
		err := r.letGo(ctx, node, rec)
		if errors.Is(err, errLost) && kill {
			err = r.kill(rec)
		} else if errors.Is(err, errLost) {
			r.todo("%v: end it by gpuckpt recover --kill -n %s %s, or start containerd, which ends it", err, rec.Namespace, rec.Container)
			return r, nil
		}
		if err != nil {
			return r, err
		}
	}
	if rec.Operation == "checkpoint" {
		r.unlockNetwork(ctx, rec.Bundle, 0) // a pod's outlives the container
	}
	if err := r.remove(rec, filepath.Dir(filepath.Dir(path))); err != nil {
		return r, err
	}
	return r, journal.Remove(path)
}

// runs reports whether the record's processes may live: they are of the kernel that runs. The error says
// that it cannot be seen from here.
func runs(rec *journal.Record) (bool, error) {
	boot, err := journal.Boot()
	if err != nil || rec.Boot != boot {
		return false, err
	}
	namespace, err := journal.PIDNamespace()
	if err == nil && namespace != rec.PIDNamespace {
		err = fmt.Errorf("the record is of a shim in the pid namespace %s, whose processes cannot be seen from %s: call it on the host", rec.PIDNamespace, namespace)
	}
	return true, err
}

// waits says what a shim that lives waits for.
func (r *Report) waits(rec *journal.Record) {
	switch rec.State {
	case journal.Paused:
		r.todo("it is paused, and its shim lives: ctr -n %s tasks resume %s", rec.Namespace, rec.Container)
	case journal.Suspended:
		r.todo("it is suspended, and its shim lives: gpuckpt resume -n %s %s", rec.Namespace, rec.Container)
	case journal.Stuck:
		r.todo("its shim lives and could not undo the %s (%s): ctr -n %s tasks resume %s tries again", rec.Operation, rec.Why, rec.Namespace, rec.Container)
	default:
		r.todo("the %s is under way since %s, in process %d, its shim: wait for its end", rec.Operation, rec.Began.Format(time.RFC3339), rec.Shim.PID)
	}
}

// errLost says that a container cannot be let go.
var errLost = errors.New("its GPU state was out of its processes and went with its shim, so it cannot go on")

// killLimit bounds the wait for processes that were killed.
const killLimit = 30 * time.Second

// kill ends a container.
func (r *Report) kill(rec *journal.Record) error {
	cg, err := cgroupOf(rec)
	if err != nil {
		return err
	}
	pids, err := cg.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		_ = proc.Signal(pid, unix.SIGKILL, cg.Has) // or it has ended
	}
	if err := cg.Thaw(); err != nil { // version 1 lets no frozen process end
		return err
	}
	for end := time.Now().Add(killLimit); rec.Init.Lives(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			return fmt.Errorf("process %d was killed and does not end within %v", rec.Init.PID, killLimit)
		}
	}
	r.did("ended: %v", errLost)
	return nil
}

// cgroupOf returns the cgroup of a container's first process, if it is still the container's.
func cgroupOf(rec *journal.Record) (*host.Cgroup, error) {
	cg, err := host.CgroupOf(rec.Init.PID)
	if err == nil && cg.Dir() != rec.Cgroup {
		err = fmt.Errorf("process %d is in cgroup %s, not in %s", rec.Init.PID, cg.Dir(), rec.Cgroup)
	}
	return cg, err
}

// letGo lets a container run on whose shim is dead.
func (r *Report) letGo(ctx context.Context, node config.Node, rec *journal.Record) error {
	if out := rec.State == journal.Suspended || rec.Operation == "resume" || slices.Contains(rec.Undo, "give GPU state back"); out {
		return errLost
	}
	if err := criu.EndOfDeadShim(rec.Bundle); err != nil {
		return err
	}
	cg, err := cgroupOf(rec)
	if err != nil {
		return err
	}
	if rec.Operation == "checkpoint" {
		r.unlockNetwork(ctx, rec.Bundle, rec.Init.PID)
		pids, _ := cg.Pids() // of one that has ended there are none
		criu.ReleaseConnections(pids)
	}
	// In the middle of this step the processes were thawed, and the driver says where the state is.
	saving := rec.Step == "save GPU state"
	if frozen, err := cg.Frozen(); err != nil || frozen && saving {
		return cmp.Or(err, errLost)
	}
	if err := cg.Thaw(); err != nil {
		return err
	}
	if !saving {
		r.did("thawed")
	}
	pids, err := cg.Pids()
	if err != nil {
		return err
	}
	n, err := unlock(ctx, node, pids, saving)
	if n > 0 {
		r.did("unlocked CUDA processes: %d", n)
	}
	if err != nil {
		return err
	}
	r.did("it runs on without a shim: let it save its work, since containerd will end it when it starts")
	return nil
}

// unlockNetwork removes what the CRIU of a checkpoint keeps packets away with. A container goes on without.
func (r *Report) unlockNetwork(ctx context.Context, bundle string, init int) {
	switch removed, err := criu.Unlock(ctx, criu.Shim{}, bundle, init); {
	case err != nil:
		r.todo("%v", err)
	case removed:
		r.did("unlocked its network")
	}
}

// unlock unlocks those of the processes that are locked, and returns how many. If their state was being
// saved, none is unlocked if the driver has checkpointed one.
func unlock(ctx context.Context, node config.Node, pids []int, saving bool) (n int, err error) {
	pids = slices.DeleteFunc(pids, func(pid int) bool {
		may, err := cuda.MayUseCUDA(pid)
		return err == nil && !may
	})
	if len(pids) == 0 {
		return 0, nil
	}
	place, err := driverroot.Find(node.DriverRoot, os.Getenv("LD_LIBRARY_PATH"), node.CDISpecDirs)
	if err != nil {
		return 0, err
	}
	helper, err := cuda.Start(ctx, cuda.Options{LibraryDir: place.Dir})
	if err != nil {
		return 0, err
	}
	defer helper.Close()
	found, err := cuda.Find(ctx, helper, pids)
	if err != nil {
		return 0, err
	}
	var locked cuda.Group
	for _, p := range found {
		if p.State == cuda.Checkpointed && saving {
			return 0, errLost
		}
		if p.State == cuda.Locked {
			p.State = cuda.Running // to which Unlock takes it
			locked = append(locked, p)
		}
	}
	if err := locked.Unlock(ctx, helper); err != nil {
		return len(locked), err
	}
	return len(locked), interposer.Open(ctx, found)
}

// remove removes what the operation has left of files, directories and mounts. dir has the records.
func (r *Report) remove(rec *journal.Record, dir string) (err error) {
	if rec.Images != nil {
		err = errors.Join(err, r.removeImages(rec, dir))
	}
	if rec.Spill != "" {
		err = errors.Join(err, r.removeSpill(rec.Spill))
	}
	if imagedir.IsTemporary(rec.Unpacked) {
		err = errors.Join(err, r.removeAll("the unpacked checkpoint", rec.Unpacked))
	}
	if rec.Operation == "restore" && rec.Work != "" && rec.RuncState != "" {
		err = errors.Join(err, criu.EndOfDeadShim(rec.Bundle), criu.RemoveMounts(rec.Work, rec.RuncState))
	}
	return err
}

func (r *Report) removeAll(what, path string) error {
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	r.did("removed %s %s", what, path)
	return nil
}

// removeImages removes what is in the directory of an incomplete checkpoint and was not there before.
// It removes what a checkpoint writes, and nothing else: since the record was written others may
// have used the directory.
func (r *Report) removeImages(rec *journal.Record, dir string) error {
	d := rec.Images
	if d.Complete() {
		r.did("the checkpoint in %s is complete, and stays", d.Path)
		return nil
	}
	if used, err := usedBy(dir, rec); err != nil || used {
		return err
	}
	entries, err := os.ReadDir(d.Path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	n := 0
	for _, e := range entries {
		if slices.Contains(d.Had, e.Name()) || len(d.Had) > 0 && !images.IsAreaFile(e.Name()) || !imagedir.IsOfCheckpoint(e.Name()) {
			continue
		}
		if err := os.Remove(filepath.Join(d.Path, e.Name())); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		n++
	}
	if d.Made {
		_ = os.Remove(d.Path) // unless somebody has put something there
	}
	if n > 0 {
		r.did("removed the incomplete checkpoint in %s: %d files", d.Path, n)
	}
	return nil
}

// usedBy reports whether a shim that lives writes to the directory of rec's images.
func usedBy(dir string, rec *journal.Record) (bool, error) {
	paths, err := journal.List(dir, "*")
	if err != nil {
		return false, err
	}
	for _, path := range paths {
		other, err := journal.Read(path)
		if err == nil && other.Images != nil && other.Images.Path == rec.Images.Path && other.Boot == rec.Boot && other.Shim.Lives() {
			return true, nil
		}
	}
	return false, nil
}

func (r *Report) removeSpill(dir string) error {
	if !staging.IsSpillDir(dir) {
		return fmt.Errorf("%s is no directory of spilled GPU state: remove it by hand", dir)
	}
	return r.removeAll("GPU state that is of no use without the container's processes,", dir)
}

// BeforeDelete ends and removes what a shim that has died has left and keeps runc from deleting its
// container. work and runcState are where CRIU and runc mount for a restore.
func BeforeDelete(ctx context.Context, bundle, work, runcState string) {
	warn(ctx, "remove the spilled GPU state", staging.RemoveDeadSpill(bundle))
	warn(ctx, "end the CRIU of a checkpoint", criu.EndOfDeadShim(bundle))
	warn(ctx, "remove what a restore has left", criu.RemoveMounts(work, runcState))
}

// AfterDelete removes what the operations of a shim that has died have left, when runc has deleted
// its container. It keeps no record, since containerd forgets the container too.
func AfterDelete(ctx context.Context, namespace, id string) {
	node, err := config.Load()
	if err != nil {
		warn(ctx, "recover", err)
		return
	}
	recoverLogged(ctx, node, journal.Path(node.StateDir, namespace, id))
}

// Sweep recovers what shims of a namespace have left that died unseen, with containerd or with the
// machine. Containers that live are left to gpuckpt recover.
func Sweep(ctx context.Context, node config.Node, namespace string) {
	paths, err := journal.List(node.StateDir, namespace)
	if err != nil {
		warn(ctx, "look for records of shims that died", err)
	}
	for _, path := range paths {
		rec, err := journal.Read(path)
		if errors.Is(err, journal.ErrEmpty) {
			warn(ctx, "remove an empty record", journal.Remove(path))
			continue
		}
		if err != nil {
			warn(ctx, "read a record of a shim", err)
			continue
		}
		here, err := runs(rec)
		if err == nil && (!here || !rec.Shim.Lives() && !rec.Init.Lives()) {
			recoverLogged(ctx, node, path)
		}
	}
}

// SweepSilently is Sweep for a program whose output, on standard error too, is an answer to containerd.
func SweepSilently(ctx context.Context, node config.Node, namespace string) {
	level := log.GetLevel()
	if err := log.SetLevel("panic"); err != nil {
		return // nothing is urgent
	}
	Sweep(ctx, node, namespace)
	_ = log.SetLevel(level.String()) // it was set before
}

func recoverLogged(ctx context.Context, node config.Node, path string) {
	r, err := Recover(ctx, node, path, false)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	warn(ctx, "recover "+path, err)
	entry := log.G(ctx).WithFields(log.Fields{"container": r.Container, "operation": r.Operation, "step": r.Step})
	entry.Infof("what a shim that died has left: %s", strings.Join(append(r.Done, r.ToDo...), "; "))
}

func warn(ctx context.Context, doing string, err error) {
	if err != nil {
		log.G(ctx).WithError(err).Warn(doing)
	}
}

// Identify fills in what a record says of a container by its first process, 0 for none yet.
func Identify(rec *journal.Record, init int) error {
	if init == 0 {
		return nil
	}
	var err error
	if rec.Init, err = proc.Identify(init); proc.Ended(err) {
		return nil // the operation will see
	}
	if err != nil {
		return err
	}
	cg, err := host.CgroupOf(init)
	if err != nil {
		return err
	}
	rec.Cgroup = cg.Dir()
	pids, err := cg.Pids()
	for _, pid := range pids {
		if p, err := proc.Identify(pid); err == nil { // else it has just ended
			rec.Processes = append(rec.Processes, p)
		}
	}
	return err
}
