// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"bytes"
	"context"
	"os"
	"testing"

	bootapi "github.com/containerd/containerd/api/runtime/bootstrap/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/pkg/shim"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// What daemons write to a shim's standard input, before 2.3 and since.
func TestBootstrapParams(t *testing.T) {
	given, err := anypb.New(&options.Options{ShimCgroup: "/shims"})
	if err != nil {
		t.Fatal(err)
	}
	encode := func(m proto.Message) []byte {
		data, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	newer := &bootapi.BootstrapParams{InstanceID: "c", Namespace: "n", ContainerdVersion: "v2.4.2"}
	for name, tt := range map[string]struct {
		input  []byte
		legacy bool
		shims  string
	}{
		"2.2, no options":     {nil, true, ""},
		"2.2, with options":   {encode(given), true, "/shims"},
		"2.3":                 {encode(newer), false, ""},
		"2.3, with extension": {encode(&bootapi.BootstrapParams{InstanceID: "c", Namespace: "n", Extensions: []*bootapi.Extension{{Value: given}}}), false, "/shims"},
	} {
		t.Run(name, func(t *testing.T) {
			params, legacy, err := bootstrapParams(tt.input, "c", "n")
			if err != nil {
				t.Fatal(err)
			}
			var found options.Options
			if _, err := params.FindExtension(&found); err != nil {
				t.Fatal(err)
			}
			if legacy != tt.legacy || params.InstanceID != "c" || params.Namespace != "n" || found.ShimCgroup != tt.shims {
				t.Errorf("legacy %v, %v, shim cgroup %q; want legacy %v, shim cgroup %q", legacy, params, found.ShimCgroup, tt.legacy, tt.shims)
			}
		})
	}
	if _, _, err := bootstrapParams([]byte("garbage"), "c", "n"); err == nil {
		t.Error("what is neither was accepted")
	}
}

type fakeManager struct {
	shim.Shim
	got *bootapi.BootstrapParams
}

func (m *fakeManager) Start(_ context.Context, params *bootapi.BootstrapParams) (*bootapi.BootstrapResult, error) {
	m.got = params
	return &bootapi.BootstrapResult{Version: 3, Address: "unix:///a", Protocol: "ttrpc"}, nil
}

// A start is answered as the daemon expects it, and a socket's directory is noted where package shim looks for it.
func TestStart(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("TTRPC_ADDRESS", "/c.ttrpc")
	m := new(fakeManager)
	answer, err := start(t.Context(), m, bytes.NewReader(nil), "c", "n", true)
	if want := `{"version":3,"address":"unix:///a","protocol":"ttrpc"}`; err != nil || string(answer) != want {
		t.Errorf("to 2.2: %s, %v; want %s", answer, err, want)
	}
	if m.got.ContainerdTtrpcAddress != "/c.ttrpc" || m.got.LogLevel != bootapi.LogLevel_LOG_LEVEL_DEBUG {
		t.Errorf("from 2.2: %v", m.got)
	}
	for _, dir := range []string{"/old", "/new"} {
		input, err := proto.Marshal(&bootapi.BootstrapParams{InstanceID: "c", Namespace: "n", SocketDir: &dir})
		if err != nil {
			t.Fatal(err)
		}
		answer, err = start(t.Context(), m, bytes.NewReader(input), "c", "n", false)
		var result bootapi.BootstrapResult
		if err != nil || proto.Unmarshal(answer, &result) != nil || result.Address != "unix:///a" {
			t.Errorf("to 2.3: %q, %v", answer, err)
		}
		if link, err := os.Readlink("s"); link != dir {
			t.Errorf("the directory of sockets is noted as %q, %v", link, err)
		}
	}
}

func TestStartArguments(t *testing.T) {
	id, namespace, debug, ok := startArguments([]string{"-namespace", "n", "-address", "a", "-publish-binary", "p", "-id", "c", "-debug", "start"})
	if !ok || id != "c" || namespace != "n" || !debug {
		t.Errorf("got %q %q %v %v", id, namespace, debug, ok)
	}
	for _, args := range [][]string{nil, {"-v"}, {"-info"}, {"-namespace", "n", "-id", "c"}, {"-id", "c", "-bundle", "b", "delete"}} {
		if _, _, _, ok := startArguments(args); ok {
			t.Errorf("%v is taken for a start", args)
		}
	}
}

// Whatever is on standard input, it is refused or taken.
func FuzzBootstrapParams(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\n\x01c\x12\x01n"))
	f.Fuzz(func(t *testing.T, input []byte) {
		params, _, err := bootstrapParams(input, "c", "n")
		if (err == nil) != (params != nil) {
			t.Errorf("%v and %v", params, err)
		}
		if err == nil && (params.InstanceID != "c" || params.Namespace != "n") {
			t.Errorf("the parameters of another: %v", params)
		}
	})
}
