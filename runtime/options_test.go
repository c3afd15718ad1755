// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/api/types/runc/options"
	runtimeoptions "github.com/containerd/containerd/api/types/runtimeoptions/v1"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

func marshal(t *testing.T, v any) *anypb.Any {
	t.Helper()
	any, err := typeurl.MarshalAnyToProto(v)
	if err != nil {
		t.Fatal(err)
	}
	return any
}

func TestParseRuncOptions(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       *options.Options
		err        string
	}{
		{name: "nothing", want: &options.Options{}},
		{
			name: "what containerd's documentation shows", text: "SystemdCgroup = true\nBinaryName = \"/opt/runc\"\nRoot = \"/run/x\"\nIoUid = 7\nNoPivotRoot = true\n",
			want: &options.Options{SystemdCgroup: true, BinaryName: "/opt/runc", Root: "/run/x", IoUid: 7, NoPivotRoot: true},
		},
		{name: "unknown key", text: "BinaryName = \"a\"\nBinaryNane = \"b\"", err: "unknown setting BinaryNane (line 2)"},
		{name: "wrong type", text: "SystemdCgroup = \"yes\"", err: "SystemdCgroup"},
		{name: "not TOML", text: "{}", err: "toml"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseRuncOptions([]byte(test.text))
			wantError(t, err, test.err)
			if test.err == "" && !proto.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
		})
	}
}

func TestRuncOptions(t *testing.T) {
	file := filepath.Join(t.TempDir(), "options.toml")
	writeFile(t, file, "BinaryName = \"from-file\"\n")
	for _, test := range []struct {
		name string
		any  *anypb.Any
		want *options.Options // nil: as given
		err  string
	}{
		{name: "none"},
		{name: "empty", any: &anypb.Any{}},
		{name: "runc's own", any: marshal(t, &options.Options{BinaryName: "a"})},
		{name: "a text", any: marshal(t, &runtimeoptions.Options{ConfigBody: []byte("BinaryName = \"b\"\n")}), want: &options.Options{BinaryName: "b"}},
		{name: "a file", any: marshal(t, &runtimeoptions.Options{ConfigPath: file}), want: &options.Options{BinaryName: "from-file"}},
		{name: "both", any: marshal(t, &runtimeoptions.Options{ConfigPath: file, ConfigBody: []byte("BinaryName = \"b\"\n")}), want: &options.Options{BinaryName: "b"}},
		{name: "no file", any: marshal(t, &runtimeoptions.Options{ConfigPath: file + "x"}), err: "read runtime options"},
		{name: "unknown key", any: marshal(t, &runtimeoptions.Options{ConfigBody: []byte("X = 1\n")}), err: "unknown setting X"},
		{name: "garbage", any: &anypb.Any{TypeUrl: marshal(t, &runtimeoptions.Options{}).TypeUrl, Value: []byte{0xff}}, err: "decode runtime options"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := runcOptions(test.any, "/default/id", true)
			wantError(t, err, test.err)
			if err != nil {
				return
			}
			if test.want == nil {
				if got != test.any {
					t.Errorf("got %v, want what was given", got)
				}
				return
			}
			opts := new(options.Options)
			if err := typeurl.UnmarshalTo(got, opts); err != nil || !proto.Equal(opts, test.want) {
				t.Errorf("got %v, error %v; want %v", opts, err, test.want)
			}
		})
	}
}

func TestCheckpointOptions(t *testing.T) {
	stop := &options.CheckpointOptions{Exit: true}
	for _, test := range []struct {
		name        string
		config      string
		any         *anypb.Any
		annotations map[string]string
		want        *options.CheckpointOptions
		err         string
	}{
		{name: "nothing is asked for"},
		{name: "the request", any: marshal(t, &options.CheckpointOptions{ImagePath: "/x"}), want: &options.CheckpointOptions{ImagePath: "/x"}},
		{name: "the request wins", any: marshal(t, &options.CheckpointOptions{}), annotations: map[string]string{annotations.OnCheckpoint: "stop"}, want: &options.CheckpointOptions{}},
		{name: "the annotation", annotations: map[string]string{annotations.OnCheckpoint: "stop"}, want: stop},
		{name: "the annotation keeps", annotations: map[string]string{annotations.OnCheckpoint: "keep"}},
		{name: "no such choice", annotations: map[string]string{annotations.OnCheckpoint: "Stop"}, err: `"Stop"`},
		{name: "an empty choice", annotations: map[string]string{annotations.OnCheckpoint: ""}, err: `""`},
		{name: "broken configuration", config: "x = 1", err: "unknown setting x"},
		{name: "other options", any: marshal(t, &options.Options{}), err: "decode checkpoint options"},
	} {
		t.Run(test.name, func(t *testing.T) {
			useConfig(t, test.config)
			got, err := checkpointOptions(test.any, config.For(test.annotations))
			wantError(t, err, test.err)
			if (got == nil) != (test.want == nil) || got != nil && !proto.Equal(got, test.want) {
				t.Errorf("got %v, want %v", got, test.want)
			}
			if _, annotated := test.annotations[annotations.OnCheckpoint]; err != nil && annotated && !errdefs.IsInvalidArgument(err) {
				t.Errorf("the error is no invalid argument: %v", err)
			}
		})
	}
}

// Options of any text are decoded or refused.
func FuzzRuncOptions(f *testing.F) {
	for _, seed := range []string{"", "SystemdCgroup = true", "BinaryName = \"runc\"\n", "X = 1", "[BinaryName]", "state = 1", "IoUid = -1"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		opts, err := parseRuncOptions(text)
		if (opts == nil) == (err == nil) {
			t.Fatalf("options %v and error %v", opts, err)
		}
		if err != nil {
			return
		}
		if _, err := typeurl.MarshalAnyToProto(opts); err != nil {
			t.Errorf("accepted, and then: %v", err)
		}
	})
}

// A client that sends no options and asks for a cgroup of systemd's gets one, where systemd runs; what a
// client sends counts.
func TestSystemdAskedFor(t *testing.T) {
	const path = "system.slice:nerdctl:id"
	for _, test := range []struct {
		name    string
		any     *anypb.Any
		path    string
		systemd bool
		want    bool
	}{
		{"none", nil, path, true, true},
		{"empty", &anypb.Any{}, path, true, true},
		{"another path", nil, "/default/id", true, false},
		{"no systemd", nil, path, false, false},
		{"runc's own", marshal(t, &options.Options{}), path, true, false},
		{"a text", marshal(t, &runtimeoptions.Options{ConfigBody: []byte("SystemdCgroup = false\n")}), path, true, false},
	} {
		got, err := runcOptions(test.any, test.path, test.systemd)
		if err != nil {
			t.Fatal(err)
		}
		opts := new(options.Options)
		if got.GetValue() != nil {
			if err := typeurl.UnmarshalTo(got, opts); err != nil {
				t.Fatal(err)
			}
		}
		if opts.SystemdCgroup != test.want {
			t.Errorf("%s: systemd %t, want %t", test.name, opts.SystemdCgroup, test.want)
		}
	}
}
