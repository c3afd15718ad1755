// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package snapshottercmd is the sub-command "gpuckpt snapshotter".
package snapshottercmd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"time"

	snapshotsapi "github.com/containerd/containerd/api/services/snapshots/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/contrib/snapshotservice"
	"github.com/containerd/containerd/v2/defaults"
	"github.com/containerd/log"
	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/internal/cli/snapshottercmd/snapshotter"
	"github.com/gpuckpt/gpuckpt/internal/node/visible/rpc"
)

const (
	// defaultRoot and defaultSocket are those of the documentation.
	defaultRoot   = "/var/lib/gpuckpt/snapshotter"
	defaultSocket = "/run/gpuckpt-snapshotter/snapshotter.sock"
	// dialLimit bounds a request for containerd's socket, endLimit the end of calls under way.
	dialLimit = 10 * time.Second
	endLimit  = 10 * time.Second
)

// Command returns the command.
func Command() *cobra.Command {
	var root, socket, address string
	var from registry.Options
	c := &cobra.Command{
		Use:   "snapshotter",
		Short: "Serve containerd's snapshots, and fetch GPU state behind a pull",
		Long: `Serve containerd's snapshots, and fetch GPU state behind a pull.

It is a proxy plugin of containerd: overlayfs, but for the GPU state of checkpoint images.
A client's pull is done without that. It streams into the snapshots behind, each byte
is written once, and a container of the image is restored meanwhile. What is
incomplete when the command ends is fetched after its next start.`,
		Example: `  gpuckpt snapshotter
  gpuckpt snapshotter --root /mnt/nvme/snapshots`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if f := cmd.Flag("log-level"); f != nil && !f.Changed { // it serves, and its log is all that it says
				if err := log.SetLevel("info"); err != nil {
					return err
				}
			}
			root, err := filepath.Abs(root)
			if err != nil {
				return err
			}
			return serve(cmd.Context(), socket, snapshotter.Options{Root: root, Registry: from, Dial: func() (*client.Client, error) {
				return client.New(address, client.WithTimeout(dialLimit))
			}})
		},
	}
	f := c.Flags()
	f.StringVar(&root, "root", defaultRoot, "directory of the snapshots")
	f.StringVar(&socket, "listen", defaultSocket, "socket that containerd's configuration names")
	f.StringVarP(&address, "address", "a", cmp.Or(os.Getenv("CONTAINERD_ADDRESS"), defaults.DefaultAddress), "containerd's socket ($CONTAINERD_ADDRESS)")
	f.StringVar(&from.HostsDir, "hosts-dir", registry.DefaultHostsDir, "containerd's directory of registries (hosts.toml)")
	f.BoolVar(&from.PlainHTTP, "plain-http", false, "talk HTTP; a registry on a loopback address may do so without")
	f.IntVar(&from.Parallel, "parallel", 0, "layers of an image that move at once (default: as many as processors, 4 to 12)")
	f.IntVar(&from.Attempts, "attempts", registry.DefaultAttempts, "how often a layer is tried")
	_ = c.MarkFlagDirname("root")
	_ = c.MarkFlagDirname("hosts-dir")
	return c
}

// serve serves until the context ends.
func serve(ctx context.Context, socket string, o snapshotter.Options) (err error) {
	l, err := listen(ctx, socket)
	if err != nil {
		return fmt.Errorf("listen at %s: %w", socket, err)
	}
	s, err := snapshotter.Open(ctx, o)
	if err != nil {
		l.Close()
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	server := grpc.NewServer(grpc.UnaryInterceptor(func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, method grpc.UnaryHandler) (any, error) {
		reply, err := method(ctx, request)
		return reply, rpc.Error(err)
	}))
	snapshotsapi.RegisterSnapshotsServer(server, snapshotservice.FromSnapshotter(s))
	defer context.AfterFunc(ctx, func() {
		hard := time.AfterFunc(endLimit, server.Stop)
		defer hard.Stop()
		server.GracefulStop()
	})()
	log.G(ctx).WithField("root", o.Root).WithField("socket", socket).Info("gpuckpt's snapshotter serves")
	if err = server.Serve(l); err != nil {
		return fmt.Errorf("serve at %s: %w", socket, err)
	}
	return nil
}

// listen makes the socket, for root alone. One that nobody serves is replaced.
func listen(ctx context.Context, socket string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(socket), 0o700); err != nil {
		return nil, err
	}
	var d net.Dialer
	if c, err := d.DialContext(ctx, "unix", socket); err == nil {
		c.Close()
		return nil, errors.New("another one serves there")
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", socket)
	if err == nil {
		if err = os.Chmod(socket, 0o600); err != nil {
			l.Close()
		}
	}
	return l, err
}
