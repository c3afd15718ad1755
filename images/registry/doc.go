// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package registry moves images between a registry and a content store, by way of containerd's
// resolver: its hosts directory (hosts.toml), mirrors, tokens and certificates work as in
// containerd. The credentials are those of the user's Docker configuration.
//
// A blob arrives whole or not at all, and blobs that the other side has are left out. So the next
// transfer continues one that ended early, a pull even in the middle of a blob. Several blobs move
// at a time, and the image gets its name last. What the network or the registry fails at is tried
// again; the first failure for good ends the transfer.
package registry

import (
	"cmp"
	"errors"
	"runtime"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// ErrNotAuthorized reports that a registry refused the credentials, or wants some.
var ErrNotAuthorized = errors.New("the registry refused access")

// Options say how an image is moved. The zero value works.
type Options struct {
	// HostsDir has registries' configuration, as containerd's config_path; empty: DefaultHostsDir.
	HostsDir string
	// PlainHTTP talks HTTP to every registry, not only to one on a loopback address.
	PlainHTTP bool
	// Credentials give the name and the secret for a registry's host; a secret without a name is an
	// identity token, neither is nobody. Nil: DockerCredentials.
	Credentials func(host string) (user, secret string, err error)
	// Parallel is how many blobs move at once; 0 is DefaultParallel().
	Parallel int
	// Attempts is how often a blob is tried; 0 is DefaultAttempts. Pause is the wait before the
	// second, on average, doubled for each further one; 0 is a second.
	Attempts int
	Pause    time.Duration
	// Stall is how long a connection of a Source may say nothing before it is cut; 0 is a minute.
	Stall time.Duration
	// Progress receives the step "push" or "pull": bytes moved or found, and why one is retried.
	Progress images.Progress
	// Ahead has sent some of the blobs of a Push already, or sends them still; nil: it has not.
	Ahead *Ahead
}

// The defaults of Options.
const (
	DefaultHostsDir = "/etc/containerd/certs.d"
	DefaultAttempts = 5
)

// DefaultParallel returns the number of processors, at least 4 and at most 16. Most digest each blob
// by one processor, with SHA-256, while it moves.
func DefaultParallel() int { return min(max(4, runtime.NumCPU()), 16) }

// Result is what a transfer did.
type Result struct {
	// Blobs and Bytes that the image has, manifests and config among them.
	Blobs int   `json:"blobs"`
	Bytes int64 `json:"bytes"`
	// Moved are the bytes that went over the wire, Reused those that the other side had.
	Moved  int64 `json:"movedBytes"`
	Reused int64 `json:"reusedBytes"`
	// GPUBytes and GPUReused are Bytes and Reused of GPU state.
	GPUBytes  int64 `json:"gpuBytes,omitempty"`
	GPUReused int64 `json:"gpuReusedBytes,omitempty"`
}

func (o Options) defaults() Options {
	o.HostsDir = cmp.Or(o.HostsDir, DefaultHostsDir)
	if o.Credentials == nil {
		o.Credentials = DockerCredentials
	}
	if o.Parallel <= 0 {
		o.Parallel = DefaultParallel()
	}
	if o.Attempts <= 0 {
		o.Attempts = DefaultAttempts
	}
	o.Pause, o.Stall = cmp.Or(o.Pause, time.Second), cmp.Or(o.Stall, time.Minute)
	return o
}
