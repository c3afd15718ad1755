// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package bootstrap runs a shim, whatever version the daemon is that starts it.
package bootstrap

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/v2/pkg/shim"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// maxBootstrap bounds what is read of a daemon, in bytes: as much as package shim.
const maxBootstrap = 10 << 20

// Run runs the shim of a manager, whatever version the daemon is that starts it.
//
// A daemon before containerd 2.3 starts a shim by arguments and variables, with the
// container's runtime options on standard input, and expects an answer in JSON. A later
// daemon writes all of this to standard input (api/runtime/bootstrap), the one form that
// package shim reads. Run translates an older daemon's request into that form.
func Run(ctx context.Context, manager shim.Shim) {
	legacy, err := acceptLegacyStart(os.Args[1:])
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %s", manager.Name(), err)
		os.Exit(1)
	}
	if legacy {
		manager = legacyManager{manager}
	}
	shim.RunShim(ctx, manager)
}

// acceptLegacyStart reports whether a daemon before 2.3 has started this shim, with
// these arguments. If so, it puts the daemon's request on standard input in the form of
// later daemons. It reports false for every call but "start".
func acceptLegacyStart(args []string) (legacy bool, err error) {
	id, namespace, debug, ok := startArguments(args)
	if !ok {
		return false, nil
	}
	input, err := io.ReadAll(io.LimitReader(os.Stdin, maxBootstrap))
	if err != nil {
		return false, fmt.Errorf("read what containerd has to say: %w", err)
	}
	params, legacy, err := bootstrapParams(input, id, namespace)
	if err != nil {
		return false, err
	}
	if legacy {
		params.ContainerdGrpcAddress = os.Getenv("GRPC_ADDRESS")
		params.ContainerdTtrpcAddress = os.Getenv("TTRPC_ADDRESS")
		if debug {
			params.LogLevel = bootapi.LogLevel_LOG_LEVEL_DEBUG
		}
		if input, err = proto.Marshal(params); err != nil {
			return false, fmt.Errorf("encode what containerd has said: %w", err)
		}
	}
	return legacy, replaceStdin(input)
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

// replaceStdin has the rest of the program read data from standard input.
func replaceStdin(data []byte) error {
	r, w, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("pass on what containerd has said: %w", err)
	}
	go func() {
		_, _ = w.Write(data) // fails when nobody reads it, and then nobody misses it
		_ = w.Close()
	}()
	os.Stdin = r
	return nil
}

// legacyManager answers "start" as a daemon before 2.3 expects it. The program ends
// with that, because package shim would add an answer of its own.
type legacyManager struct{ shim.Shim }

func (m legacyManager) Start(ctx context.Context, params *bootapi.BootstrapParams) (*bootapi.BootstrapResult, error) {
	result, err := m.Shim.Start(ctx, params)
	if err != nil {
		return nil, err
	}
	answer, err := json.Marshal(struct {
		Version  int32  `json:"version"`
		Address  string `json:"address"`
		Protocol string `json:"protocol"`
	}{result.Version, result.Address, result.Protocol})
	if err != nil {
		return nil, err
	}
	if _, err := os.Stdout.Write(answer); err != nil {
		return nil, err
	}
	os.Exit(0)
	return nil, nil
}
