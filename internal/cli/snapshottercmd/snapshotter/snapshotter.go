// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package snapshotter is containerd's overlayfs snapshotter, which fetches the GPU state of
// checkpoint images itself and behind everything else: a client's pull is done, and its container
// can be started, while GPU state still arrives. Each byte of it is written once, into the snapshot.
//
// containerd asks Prepare for a directory for each layer, bottom up, and fetches and unpacks the
// layer into it. For a layer of GPU state of an image whose manifest the labels name, Prepare commits
// a snapshot with an empty file of the right size instead, and answers that the layer exists, as
// containerd's protocol for remote snapshotters has it. The bytes come behind (package arriving).
// Prepare unpacks the layer with CRIU's images as well, the last of all. Beside its directory is a
// socket that tells the shim what has arrived (package feed). All other layers and images go
// the way of overlayfs.
//
// What is under way is on record below the root, and goes on after a restart.
package snapshotter

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/snapshotters"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/images/registry"
)

// Options of a Snapshotter.
type Options struct {
	// Root is the directory of the snapshots.
	Root string
	// Dial connects to the containerd whose plugin this is. It is called when an image is pulled.
	Dial func() (*client.Client, error)
	// Registry says how GPU state is fetched.
	Registry registry.Options
}

// Snapshotter is a snapshots.Snapshotter. Keys are those of containerd's metadata service: the
// namespace, a number and the client's key.
type Snapshotter struct {
	snapshots.Snapshotter // overlayfs
	o                     Options

	ctx    context.Context // of all that is fetched
	cancel context.CancelFunc
	under  sync.WaitGroup

	mu       sync.Mutex
	arrivals map[string]*arrival // by arrivalKey
	parts    map[string]*arrival // by the name of a snapshot that is not complete, or whose GPU state is not
	declined map[string]time.Time
	counted  map[string]string // directories of snapshots whose usage was asked for, by their names
}

// declineFor is how long an image whose registry did not answer here is left to containerd: as long
// as most pulls take.
const declineFor = 10 * time.Minute

// Open opens the snapshots below the root, and goes on with what was under way.
func Open(ctx context.Context, o Options) (*Snapshotter, error) {
	shots, err := overlay.NewSnapshotter(o.Root, overlay.AsynchronousRemove)
	if err != nil {
		return nil, fmt.Errorf("open the snapshots in %s: %w", o.Root, err)
	}
	s := &Snapshotter{Snapshotter: shots, o: o, arrivals: make(map[string]*arrival), parts: make(map[string]*arrival), declined: make(map[string]time.Time), counted: make(map[string]string)}
	s.ctx, s.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := s.goOn(); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// Close ends what is under way; the next Open goes on with it.
func (s *Snapshotter) Close() error {
	s.cancel()
	s.mu.Lock()
	for _, a := range s.arrivals {
		a.letGo()
	}
	s.mu.Unlock()
	s.under.Wait()
	return s.Snapshotter.Close()
}

// arrivalKey names an image in a namespace: each namespace has snapshots of its own.
func arrivalKey(namespace, manifest string) string { return namespace + " " + manifest }

// Prepare makes a snapshot, or answers that the layer it is for exists.
func (s *Snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	var info snapshots.Info
	for _, o := range opts {
		if err := o(&info); err != nil {
			return nil, err
		}
	}
	target := info.Labels[snapshots.LabelSnapshotRef]
	if target == "" {
		s.wake(parent)
		return s.Snapshotter.Prepare(ctx, key, parent, opts...)
	}
	switch made, err := s.arrives(ctx, key, parent, target, info.Labels); {
	case err != nil:
		return nil, err
	case made:
		return nil, fmt.Errorf("layer %s is fetched by gpuckpt: %w", target, errdefs.ErrAlreadyExists)
	}
	return s.Snapshotter.Prepare(ctx, key, parent, opts...)
}

// View makes a snapshot to be read.
func (s *Snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	s.wake(parent)
	return s.Snapshotter.View(ctx, key, parent, opts...)
}

// wake tries again to fetch what a container needs that is about to be made.
func (s *Snapshotter) wake(parent string) {
	s.mu.Lock()
	a := s.parts[parent]
	s.mu.Unlock()
	if a != nil {
		a.retry()
	}
}

// arrives commits the snapshot of a layer if it is one of a checkpoint whose GPU state is fetched
// here. made says that it did, or had before; else containerd is to unpack the layer.
func (s *Snapshotter) arrives(ctx context.Context, key, parent, target string, labels map[string]string) (made bool, err error) {
	ref, manifest := labels[snapshotters.TargetRefLabel], labels[snapshotters.TargetManifestDigestLabel]
	namespace, _, ok := strings.Cut(key, "/")
	if ref == "" || manifest == "" || !ok {
		return false, nil // the client says nothing of the image
	}
	a := s.arrivalOf(namespace, manifest)
	if a == nil {
		return false, nil
	}
	defer a.preparing.Unlock()
	if a.image == nil {
		ours, err := a.begin(ctx, ref, manifest)
		if !ours {
			s.decline(ctx, a, ref, err)
			return false, nil
		}
	}
	defer a.holds.take(a.image)()
	return a.prepare(ctx, key, parent, target, labels)
}

// arrivalOf returns the arrival of an image, with preparing held; nil if it was declined.
func (s *Snapshotter) arrivalOf(namespace, manifest string) *arrival {
	at := arrivalKey(namespace, manifest)
	for {
		s.mu.Lock()
		a := s.arrivals[at]
		if a == nil && time.Since(s.declined[at]) > declineFor {
			delete(s.declined, at)
			a = newArrival(s, record{Namespace: namespace, Manifest: manifest})
			s.arrivals[at] = a
		}
		s.mu.Unlock()
		if a == nil {
			return nil
		}
		a.preparing.Lock()
		if !a.isOver() {
			return a
		}
		a.preparing.Unlock()
		<-a.left
	}
}

// decline leaves an image to containerd, for a while if the error is not nil.
func (s *Snapshotter) decline(ctx context.Context, a *arrival, ref string, err error) {
	at := arrivalKey(a.Namespace, a.Manifest)
	s.mu.Lock()
	if err != nil {
		s.declined[at] = time.Now()
		log.G(ctx).WithError(err).WithField("image", ref).Warn("gpuckpt cannot fetch the GPU state of the image: containerd fetches and unpacks it")
	}
	s.mu.Unlock()
	a.end()
}

// Remove removes a snapshot, and ends what is fetched for it.
func (s *Snapshotter) Remove(ctx context.Context, key string) error {
	if err := s.Snapshotter.Remove(ctx, key); err != nil {
		return err
	}
	s.mu.Lock()
	a := s.parts[key]
	delete(s.parts, key)
	delete(s.counted, key)
	s.mu.Unlock()
	if a != nil {
		return a.drop(key)
	}
	return nil
}

// Cleanup removes the directories of snapshots that were removed.
func (s *Snapshotter) Cleanup(ctx context.Context) error {
	c, ok := s.Snapshotter.(snapshots.Cleaner)
	if !ok {
		return errdefs.ErrNotImplemented
	}
	return c.Cleanup(ctx)
}

// arrivingSuffix ends the name of a snapshot that was empty when it was committed. No image's layer and no
// container can have such a name.
const arrivingSuffix = " arriving"

// Usage returns what a snapshot takes. overlayfs counts at the commit.
func (s *Snapshotter) Usage(ctx context.Context, key string) (snapshots.Usage, error) {
	info, err := s.Stat(ctx, key)
	if err != nil || info.Kind != snapshots.KindCommitted || !strings.HasSuffix(key, arrivingSuffix) {
		return s.Snapshotter.Usage(ctx, key)
	}
	root, err := s.rootOf(ctx, key)
	if err != nil {
		return snapshots.Usage{}, err
	}
	used, err := fs.DiskUsage(ctx, root)
	return snapshots.Usage(used), err
}

// rootOf returns the directory of a committed snapshot, which overlayfs tells for the mounts of a view.
func (s *Snapshotter) rootOf(ctx context.Context, key string) (root string, err error) {
	s.mu.Lock()
	root = s.counted[key]
	s.mu.Unlock()
	if root != "" {
		return root, nil
	}
	view := key + " counted " + rand.Text()
	mounts, err := s.Snapshotter.View(ctx, view, key)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, s.Snapshotter.Remove(context.WithoutCancel(ctx), view)) }()
	root, below, err := roots(mounts)
	if len(below) > 0 {
		root, err = below[0], nil
	}
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.counted[key] = root
	return root, nil
}

// committed returns the name of a layer's snapshot, "" if there is none.
func (s *Snapshotter) committed(ctx context.Context, target, parent string) (name string, err error) {
	err = s.Walk(ctx, func(_ context.Context, i snapshots.Info) error {
		if i.Kind == snapshots.KindCommitted && i.Labels[snapshots.LabelSnapshotRef] == target && i.Parent == parent {
			name = cmp.Or(name, i.Name)
		}
		return nil
	})
	return name, err
}

// roots returns the directory of an active snapshot, and those of the layers below, the topmost
// first; of a view the latter, and an error.
func roots(mounts []mount.Mount) (root string, below []string, err error) {
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		return mounts[0].Source, nil, nil
	}
	if len(mounts) == 1 {
		for _, o := range mounts[0].Options {
			if dir, ok := strings.CutPrefix(o, "upperdir="); ok {
				root = dir
			}
			if dirs, ok := strings.CutPrefix(o, "lowerdir="); ok {
				below = strings.Split(dirs, ":")
			}
		}
	}
	if root == "" {
		return "", below, fmt.Errorf("overlayfs made a snapshot without a directory: %v", mounts)
	}
	return root, below, nil
}

// syncFile puts a file onto the disk: before that it does not count as arrived.
func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}
