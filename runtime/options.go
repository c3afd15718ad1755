// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	"os"

	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// runcOptions returns the options of a Create request as runc's shim wants them. A client that names
// a runtime other than runc's sends none, and may ask for a cgroup of systemd's all the same, as nerdctl
// does where systemd runs: runc would take "SLICE:PREFIX:NAME" for the name of a directory.
//
// A client that does not know this runtime's name sends runtimeoptions.v1
// with a TOML file or text in place of runc's options (containerd's CRI and
// `ctr run --runtime-config-path`); runc's shim would panic on it. The TOML's
// keys are those of containerd's configuration, "SystemdCgroup".
func runcOptions(any *anypb.Any, cgroup string, systemd bool) (*anypb.Any, error) {
	if any.GetTypeUrl() == "" && systemd && host.IsSystemdPath(cgroup) {
		return typeurl.MarshalAnyToProto(&options.Options{SystemdCgroup: true})
	}
	if any.GetValue() == nil || !typeurl.Is(any, (*runtimeoptions.Options)(nil)) {
		return any, nil
	}
	var given runtimeoptions.Options
	if err := typeurl.UnmarshalTo(any, &given); err != nil {
		return nil, fmt.Errorf("decode runtime options: %w", err)
	}
	text := given.ConfigBody
	if len(text) == 0 && given.ConfigPath != "" {
		var err error
		if text, err = os.ReadFile(given.ConfigPath); err != nil {
			return nil, fmt.Errorf("read runtime options: %w", err)
		}
	}
	opts, err := parseRuncOptions(text)
	if err != nil {
		return nil, fmt.Errorf("runtime options: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return typeurl.MarshalAnyToProto(opts)
}

// parseRuncOptions is strict: a key that runc's options do not have is refused.
func parseRuncOptions(text []byte) (*options.Options, error) {
	opts := new(options.Options)
	if err := config.Decode(text, opts); err != nil {
		return nil, err
	}
	return opts, nil
}

// checkpointOptions decodes the options of a Checkpoint request. It returns nil for a
// request without options, unless the container's annotation or the node's file asks
// that the container ends.
func checkpointOptions(any *anypb.Any, read config.Source) (*options.CheckpointOptions, error) {
	if any != nil {
		opts := new(options.CheckpointOptions)
		if err := typeurl.UnmarshalTo(any, opts); err != nil {
			return nil, fmt.Errorf("decode checkpoint options: %w: %w", err, errdefs.ErrInvalidArgument)
		}
		return opts, nil
	}
	view, err := read()
	if err != nil {
		return nil, err
	}
	if stops, err := view.StopsAfterCheckpoint(); err != nil || !stops {
		return nil, err
	}
	return &options.CheckpointOptions{Exit: true}, nil
}
