// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bootstrap runs a shim, whatever version the daemon is that starts it.
package bootstrap

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/shim"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// maxBootstrap bounds what is read of a daemon, in bytes: as much as package shim.
const maxBootstrap = 10 << 20

// socketDirLink is where package shim looks for the directory of sockets, in the bundle.
const socketDirLink = "s"

// Run runs the shim of a manager, whatever version the daemon is that starts it.
//
// A daemon before containerd 2.3 starts a shim by arguments and variables, with the
// container's runtime options on standard input, and expects an answer in JSON. A later
// daemon writes all of this to standard input (api/runtime/bootstrap), the one form that
// package shim reads. So a start is answered here. Package shim would also collect
// garbage and become a subreaper first, in a program that ends at once.
func Run(ctx context.Context, manager shim.Shim) {
	id, namespace, debug, ok := startArguments(os.Args[1:])
	if !ok {
		shim.RunShim(ctx, manager)
		return
	}
	answer, err := start(namespaces.WithNamespace(ctx, namespace), manager, os.Stdin, id, namespace, debug)
	if err == nil {
		_, err = os.Stdout.Write(answer)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s", manager.Name(), err)
		os.Exit(1)
	}
}

// start starts a shim for a daemon, and returns where it listens, as the daemon expects it.
func start(ctx context.Context, manager shim.Shim, in io.Reader, id, namespace string, debug bool) (answer []byte, err error) {
	input, err := io.ReadAll(io.LimitReader(in, maxBootstrap))
	if err != nil {
		return nil, fmt.Errorf("read what containerd has to say: %w", err)
	}
	params, legacy, err := bootstrapParams(input, id, namespace)
	if err != nil {
		return nil, err
	}
	if legacy {
		params.ContainerdGrpcAddress = os.Getenv("GRPC_ADDRESS")
		params.ContainerdTtrpcAddress = os.Getenv("TTRPC_ADDRESS")
		if debug {
			params.LogLevel = bootapi.LogLevel_LOG_LEVEL_DEBUG
		}
	}
	if dir := params.GetSocketDir(); dir != "" { // for package shim, which removes the socket at last
		if err := os.Remove(socketDirLink); err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("note the directory of sockets: %w", err)
		}
		if err := os.Symlink(dir, socketDirLink); err != nil {
			return nil, fmt.Errorf("note the directory of sockets: %w", err)
		}
	}
	result, err := manager.Start(ctx, params)
	if err != nil {
		return nil, err
	}
	if !legacy {
		return proto.Marshal(result)
	}
	return json.Marshal(struct {
		Version  int32  `json:"version"`
		Address  string `json:"address"`
		Protocol string `json:"protocol"`
	}{result.Version, result.Address, result.Protocol})
}

// startArguments reads a shim's arguments. ok is false for all but "start", and for
// what package shim will refuse.
func startArguments(args []string) (id, namespace string, debug, ok bool) {
	flags := flag.NewFlagSet("", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	flags.StringVar(&id, "id", "", "")
	flags.StringVar(&namespace, "namespace", "", "")
	flags.BoolVar(&debug, "debug", false, "")
	for _, name := range []string{"socket", "debug-socket", "bundle", "address", "publish-binary"} {
		flags.String(name, "", "")
	}
	ok = flags.Parse(args) == nil && flags.Arg(0) == "start"
	return id, namespace, debug, ok
}

// bootstrapParams reads what a daemon has written to a shim's standard input. An older
// daemon writes nothing, or the runtime options.
func bootstrapParams(input []byte, id, namespace string) (_ *bootapi.BootstrapParams, legacy bool, _ error) {
	params := new(bootapi.BootstrapParams)
	if err := proto.Unmarshal(input, params); err == nil && len(input) > 0 && params.InstanceID == id && params.Namespace == namespace {
		return params, false, nil
	}
	params = &bootapi.BootstrapParams{InstanceID: id, Namespace: namespace}
	if len(input) == 0 {
		return params, true, nil
	}
	options := new(anypb.Any)
	if err := proto.Unmarshal(input, options); err != nil {
		return nil, false, fmt.Errorf("read the runtime options of container %s: %w", id, err)
	}
	params.Extensions = []*bootapi.Extension{{Value: options}}
	return params, true, nil
}
