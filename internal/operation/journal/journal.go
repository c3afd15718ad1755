// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package journal keeps a record on disk of what is done to a container, for whoever finds the node
// after a crash. Package recovery reads it.
//
// The life of a record: Write writes it before an operation changes anything. Note names each step,
// before it is taken, and what would undo those before. End removes the record, or leaves it where
// the container stays as the operation left it: paused, suspended, or stuck, because the way back has
// failed. All of this is for the case that processes die. A machine that loses its power loses all
// processes. What may then be left is on disks, and in the first version of the record.
//
// So an operation flushes that version only if it may leave files that nothing else names, and before
// any of them can be on a disk for good: a checkpoint with GPU state flushes at once, since each part
// of that state is flushed when it is written. Files that are not flushed, CRIU's images, are on no disk for
// seconds: a restore and a checkpoint of CRIU alone flush beside CRIU. What notes something waits for it.
package journal

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/imagedir"
)

// Schema is the version of Record. A record of a later one is refused.
const Schema = 1

// The states of a container between operations; "" while one is under way.
const (
	Paused    = "paused"
	Suspended = "suspended"
	Stuck     = "stuck" // a way back has failed
)

// Record is what is known of a container that is being changed, or stays changed.
type Record struct {
	Schema    int    `json:"schema"`
	Namespace string `json:"namespace"`
	Container string `json:"container"`
	Bundle    string `json:"bundle"`
	// Boot is the boot_id of the kernel that the processes are of.
	Boot string `json:"boot"`
	// PIDNamespace is what the pids are numbers of, as /proc/self/ns/pid.
	PIDNamespace string `json:"pidNamespace"`
	// Shim is the shim, Init the container's first process. Init is of pid 0 before there is one.
	Shim proc.Process `json:"shim"`
	Init proc.Process `json:"init"`
	// Processes are the container's when the operation began.
	Processes []proc.Process `json:"processes,omitempty"`
	// Cgroup is the container's, as a directory; "" before there is one.
	Cgroup string `json:"cgroup,omitempty"`

	Operation string    `json:"operation"` // "pause", "checkpoint", "restore", "suspend", "resume"
	Began     time.Time `json:"began"`
	// Step is the one that was begun last, Undo what undoes the steps before it, the last first.
	Step string   `json:"step,omitempty"`
	Undo []string `json:"undo,omitempty"`
	// State is where the container stays when the operation is over, and Why what went wrong.
	State string `json:"state,omitempty"`
	Why   string `json:"why,omitempty"`

	// What the operation may leave on disks, see package recovery.

	// Images is where a checkpoint writes, as it was before.
	Images *imagedir.Dir `json:"images,omitempty"`
	// Spill is the directory with the GPU state of a suspended container.
	Spill string `json:"spill,omitempty"`
	// Unpacked is a directory that containerd has made for a restore.
	Unpacked string `json:"unpacked,omitempty"`
	// Work and RuncState are the directories that CRIU and runc mount in for a restore.
	Work      string `json:"work,omitempty"`
	RuncState string `json:"runcState,omitempty"`
}

// Path returns the file of a container's record below a directory of records.
func Path(dir, namespace, id string) string { return filepath.Join(dir, namespace, id+".json") }

// Journal is the journal of one container. The zero Journal has no record. Its methods may be called
// at once: a way back is taken beside steps.
type Journal struct {
	mu     sync.Mutex
	path   string
	record *Record // nil if there is none

	sync func(*os.File) error // a test's; nil is File.Sync
}

// Write writes a record, in place of the one before. dir is the directory of records. On an error the
// record before is still there.
func (j *Journal) Write(dir string, r Record) (err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r.Schema, r.Began = Schema, time.Now().UTC()
	if r.Boot, err = Boot(); err == nil {
		r.PIDNamespace, err = PIDNamespace()
	}
	if err == nil {
		r.Shim, err = proc.Identify(os.Getpid())
	}
	path := Path(dir, r.Namespace, r.Container)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err == nil {
		err = write(path, &r)
	}
	if err != nil {
		return fmt.Errorf("write the record of the %s: %w", r.Operation, err)
	}
	j.path, j.record = path, &r
	return nil
}

// FlushBeside begins to flush the record that was written. wait returns when it is on the disk, under
// its name. Whatever would change the record waits as well.
func (j *Journal) FlushBeside() (wait func() error) {
	j.mu.Lock()
	done := make(chan error, 1)
	go func() {
		defer j.mu.Unlock()
		done <- j.flush()
	}()
	return func() error { return <-done }
}

// flush flushes the record, its name, and that of its directory.
func (j *Journal) flush() error {
	if j.record == nil {
		return nil
	}
	for _, path := range []string{j.path, filepath.Dir(j.path), filepath.Dir(filepath.Dir(j.path))} {
		f, err := os.Open(path)
		if err == nil {
			if j.sync != nil {
				err = j.sync(f)
			} else {
				err = f.Sync()
			}
			err = errors.Join(err, f.Close())
		}
		if err != nil {
			return fmt.Errorf("flush the record of the %s: %w", j.record.Operation, err)
		}
	}
	return nil
}

// Note notes that a step is begun, and what undoes the steps before it.
func (j *Journal) Note(ctx context.Context, step string, undo []string) {
	j.change(ctx, func(r *Record) { r.Step, r.Undo = step, undo })
}

// Spills notes where a suspension keeps GPU state.
func (j *Journal) Spills(ctx context.Context, dir string) {
	j.change(ctx, func(r *Record) { r.Spill = dir })
}

func (j *Journal) change(ctx context.Context, change func(*Record)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.record == nil {
		return
	}
	change(j.record)
	if err := write(j.path, j.record); err != nil {
		log.G(ctx).WithError(err).Warn("keep the container's record") // it says too little then, nothing wrong
	}
}

// End ends the operation. The container stays in a state, because of an error if that is Stuck; "" is
// none of them, and the record is removed.
func (j *Journal) End(ctx context.Context, state string, why error) {
	if state != "" {
		j.change(ctx, func(r *Record) {
			if r.State = state; why != nil {
				r.Why = why.Error()
			}
		})
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.record == nil {
		return
	}
	if err := Remove(j.path); err != nil {
		log.G(ctx).WithError(err).Warn("remove the container's record")
	}
	j.record = nil
}

// write replaces a record.
func write(path string, r *Record) error {
	data, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	next := path + ".next"
	if err = os.WriteFile(next, append(data, '\n'), 0o600); err == nil {
		err = os.Rename(next, path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(next))
	}
	return nil
}

// Remove removes a record. One that is not there is no error.
func Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// ErrEmpty is the error of a record that was never flushed when the power was lost: nothing of its operation is left.
var ErrEmpty = errors.New("it is empty: the power was lost")

// Read reads a record. The error is os.ErrNotExist if there is none, or ErrEmpty.
func Read(path string) (*Record, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if len(data) == 0 {
		return nil, fmt.Errorf("read the record %s: %w", path, ErrEmpty)
	}
	r := new(Record)
	if err := json.Unmarshal(data, r); err != nil {
		return nil, fmt.Errorf("read the record %s: %w", path, err)
	}
	if r.Schema != Schema {
		return nil, fmt.Errorf("the record %s has schema %d and this program knows %d: use the gpuckpt that wrote it", path, r.Schema, Schema)
	}
	if path != Path(filepath.Dir(filepath.Dir(path)), r.Namespace, r.Container) {
		return nil, fmt.Errorf("the record %s is of container %s in namespace %s", path, r.Container, r.Namespace)
	}
	return r, nil
}

// List returns the paths of the records of a namespace, sorted; of all namespaces if it is "*".
func List(dir, namespace string) ([]string, error) {
	if namespace != "*" && namespace != filepath.Base(namespace) || strings.ContainsAny(strings.TrimPrefix(namespace, "*"), "*?[") {
		return nil, fmt.Errorf("%q is no namespace", namespace)
	}
	if _, err := os.ReadDir(dir); err != nil && !errors.Is(err, os.ErrNotExist) { // of which Glob says nothing
		return nil, err
	}
	paths, err := filepath.Glob(filepath.Join(dir, namespace, "*.json"))
	slices.Sort(paths)
	return paths, err
}

// PIDNamespace returns the pid namespace of this process.
func PIDNamespace() (string, error) { return os.Readlink("/proc/self/ns/pid") }

// Boot returns the boot_id of the running kernel.
func Boot() (string, error) {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(text)), err
}
