// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node is what the agent does on its node: it has the node's own gpuckpt take checkpoints of pods
// and push them.
package node

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// longest bounds a checkpoint that has no bound of its own, and a push.
const longest = time.Hour

// Node is the node that the agent runs on.
type Node struct {
	// Root is where the node's root is mounted.
	Root string
	// Program is the node's gpuckpt, as the node sees it; empty: where it was installed.
	Program string
	// Containerd is the socket of the node's containerd, as the node sees it.
	Containerd string
	// PlainHTTP talks HTTP to registries.
	PlainHTTP bool
	// Keys is the directory for the keys of the cluster's nodes, as the node sees it.
	Keys string
	// Env is what the node's gpuckpt gets beside PATH.
	Env []string
}

// Pushed is what a push did.
type Pushed struct {
	Image  string  `json:"image"`
	Digest string  `json:"digest"`
	Moved  int64   `json:"movedBytes"` // what the registry lacked
	Took   float64 `json:"seconds"`
}

// Captured is the image that was made of a container of a pod.
type Captured struct {
	Name          string  `json:"name"`
	Image         string  `json:"image"`
	Bytes         int64   `json:"bytes"`
	GPUBytes      int64   `json:"gpuBytes"`
	PausedSeconds float64 `json:"pausedSeconds"`
	BuildSeconds  float64 `json:"buildSeconds"`
	// Push is nil if the image could not be pushed; PushError says why.
	Push      *Pushed `json:"push"`
	PushError string  `json:"pushError"`
	// Stays says that the image is to stay on the node.
	Stays bool `json:"-"`
}

// Wanted is what a checkpoint is asked for.
type Wanted struct {
	Namespace, Pod string
	Containers     []string // by their names
	// Image is what the image is called on the node, and Target where it is pushed to. Of several
	// containers each has "-" and the container's name behind.
	Image, Target string
	// Credentials are the docker config.json to push with.
	Credentials []byte
	// Limit bounds the checkpoint; 0 is an hour.
	Limit time.Duration
	// Progress is told, about each second, how many bytes are in the registry, of how many that are known.
	Progress func(done, total uint64)
}

// Checkpoint makes images of containers of a pod, in one cut, and pushes them while they are made. The
// images are in the node's containerd then, also those that could not be pushed. On an error all
// containers are as they were, and there is no image, unless the error says that they are complete.
func (n Node) Checkpoint(ctx context.Context, w Wanted) ([]Captured, error) {
	limit := cmp.Or(w.Limit, longest)
	bound, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("it was not complete within %s, its timeoutSeconds or what was left of the pod's grace period", limit))
	defer cancel()
	var made struct{ Containers []Captured }
	args := append([]string{"checkpoint", "--pod", w.Namespace + "/" + w.Pod, "--image", w.Image, "--push", w.Target, "--leave-running"}, w.Containers...)
	if err := n.gpuckpt(bound, w.Credentials, w.Progress, &made, n.registry(args)...); err != nil && made.Containers == nil {
		return nil, err
	}
	if bound.Err() == nil {
		return made.Containers, nil
	}
	// The time was for the checkpoint. What is on its way to the registry goes on.
	n.Push(ctx, w, made.Containers)
	return made.Containers, nil
}

// Push pushes those images of a checkpoint that are not pushed, and notes what came of it. Its progress is
// that of all images, by their bytes.
func (n Node) Push(ctx context.Context, w Wanted, made []Captured) {
	var before, all float64
	for _, m := range made {
		all += float64(m.Bytes)
	}
	tell := w.Progress
	for i := range made {
		m := &made[i]
		if tell != nil {
			begun := before
			w.Progress = func(done, total uint64) {
				tell(uint64(begun+float64(m.Bytes)*float64(done)/float64(max(total, done, 1))), uint64(all))
			}
		}
		before += float64(m.Bytes)
		if m.Push != nil {
			continue
		}
		pushed, err := n.push(ctx, m.Image, w.Target+strings.TrimPrefix(m.Image, w.Image), w)
		if m.Push, m.PushError = pushed, ""; err != nil {
			m.PushError = err.Error()
		}
	}
}

// Taken returns the images in the node's containerd whose names begin so. How long they took is not known.
func (n Node) Taken(ctx context.Context, prefix string) (taken []Captured, err error) {
	var all []struct {
		Captured
		Container string
	}
	if err := n.gpuckpt(ctx, nil, nil, &all, "ls", prefix); err != nil {
		return nil, err
	}
	for _, m := range all {
		m.Name = m.Container
		taken = append(taken, m.Captured)
	}
	return taken, nil
}

// push pushes an image that is in containerd. What is returned is nil on an error.
func (n Node) push(ctx context.Context, image, target string, w Wanted) (*Pushed, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, longest, fmt.Errorf("the push was not complete within %s", longest))
	defer cancel()
	var pushed Pushed
	if err := n.gpuckpt(ctx, w.Credentials, w.Progress, &pushed, n.registry([]string{"image", "push", "containerd:" + image, target})...); err != nil {
		return nil, err
	}
	return &pushed, nil
}

// registry adds to arguments how registries are talked to.
func (n Node) registry(args []string) []string {
	if n.PlainHTTP {
		args = append(args, "--plain-http")
	}
	return args
}

// Discard removes an image from the node's containerd. The kubelet may have been quicker: it frees its disk.
func (n Node) Discard(ctx context.Context, image string) error {
	err := n.gpuckpt(ctx, nil, nil, nil, "rm", image)
	if err == nil {
		return nil
	}
	if left, lerr := n.Taken(ctx, image); lerr == nil && len(left) == 0 {
		return nil
	}
	return err
}

// Recover resumes what checkpoints that were killed with their agent have left paused.
func (n Node) Recover(ctx context.Context) error {
	return n.gpuckpt(ctx, nil, nil, nil, "recover")
}

// gpuckpt runs the node's gpuckpt in the node's root. One that has failed at a part prints its answer
// all the same. Of the node's own credentials for registries it has none.
func (n Node) gpuckpt(ctx context.Context, credentials []byte, progress func(done, total uint64), answer any, args ...string) error {
	cmd, err := n.command(ctx, append(args, "--json", "--address", n.Containerd, "--namespace", "k8s.io")...)
	if err != nil {
		return err
	}
	if credentials != nil {
		file, err := inMemory(credentials)
		if err != nil {
			return fmt.Errorf("hand over the credentials: %w", err)
		}
		defer file.Close()
		cmd.ExtraFiles, cmd.Env = []*os.File{file}, append(cmd.Env, "REGISTRY_AUTH_FILE=/proc/self/fd/3")
	}
	var out bytes.Buffer
	errs := reader{progress: progress, far: map[string]line{}}
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	errs.rest.Write(errs.part)
	if err != nil {
		var said struct{ Error string }
		if json.Unmarshal(errs.rest.Bytes(), &said) == nil && said.Error != "" {
			err = errors.New(said.Error)
		} else {
			err = fmt.Errorf("gpuckpt %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(errs.rest.Bytes()))
		}
	}
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) { // else its words are of the signal
		err = fmt.Errorf("%w: %w", context.Cause(ctx), err)
	}
	if answer == nil || err != nil && out.Len() == 0 {
		return err
	}
	if jerr := json.Unmarshal(out.Bytes(), answer); jerr != nil {
		return errors.Join(err, fmt.Errorf("gpuckpt %s printed %q: %w", strings.Join(args, " "), out.Bytes(), jerr))
	}
	return err
}

// line is what gpuckpt says of a step on standard error (internal/cli/progress).
type line struct {
	Step        string
	Done, Total uint64
}

// reader takes what gpuckpt says on standard error, a line at a time.
type reader struct {
	progress func(done, total uint64) // may be nil
	part     []byte                   // of a line
	far      map[string]line          // the pushes, by step
	rest     bytes.Buffer             // what is no progress
}

func (r *reader) Write(p []byte) (int, error) {
	r.part = append(r.part, p...)
	for {
		end := bytes.IndexByte(r.part, '\n')
		if end < 0 {
			return len(p), nil
		}
		r.take(r.part[:end+1])
		r.part = r.part[end+1:]
	}
}

func (r *reader) take(text []byte) {
	var now line
	if json.Unmarshal(text, &now) != nil || now.Step == "" {
		r.rest.Write(text)
		return
	}
	if r.progress == nil || !strings.HasSuffix(now.Step, "push") {
		return
	}
	r.far[now.Step] = now
	var all line
	for _, step := range r.far {
		all.Done, all.Total = all.Done+step.Done, all.Total+step.Total
	}
	r.progress(all.Done, all.Total)
}

// command returns a command of the node's gpuckpt.
func (n Node) command(ctx context.Context, args ...string) (*exec.Cmd, error) {
	program, err := n.program()
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.SysProcAttr, cmd.Dir = &syscall.SysProcAttr{Chroot: n.Root}, "/"
	cmd.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}, n.Env...)
	cmd.Env = append(cmd.Env, "HOME=", "DOCKER_CONFIG=", "XDG_RUNTIME_DIR=", "XDG_CONFIG_HOME=")
	// It undoes what it has begun, if it is not killed.
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, time.Minute
	return cmd, nil
}

// inMemory returns a file of the data that no file system has, so that nothing of it is left behind.
func inMemory(data []byte) (*os.File, error) {
	fd, err := unix.MemfdCreate("credentials", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "credentials")
	if _, err := f.Write(data); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// program returns where gpuckpt install has put gpuckpt.
func (n Node) program() (string, error) {
	if n.Program != "" {
		return n.Program, nil
	}
	var record struct{ Prefix string }
	data, err := os.ReadFile(filepath.Join(n.Root, "var/lib/gpuckpt/installed.json"))
	if err == nil {
		err = json.Unmarshal(data, &record)
	}
	if err == nil && record.Prefix == "" {
		err = errors.New("the record of the installation names no prefix")
	}
	if err != nil {
		return "", fmt.Errorf("gpuckpt is not installed on this node: see its pod of the DaemonSet gpuckpt-node: %w", err)
	}
	return filepath.Join(record.Prefix, "bin", "gpuckpt"), nil
}
