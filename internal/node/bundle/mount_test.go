// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"reflect"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
)

func TestParseMount(t *testing.T) {
	got, err := ParseMount("type=bind,src=/a,dst=/b,options=rbind:ro")
	if want := (specs.Mount{Type: "bind", Source: "/a", Destination: "/b", Options: []string{"rbind", "ro"}}); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, at := range []string{"/dev/shm", "/dev/shm/", "/dev//shm", "/dev/pts/../shm", "dev/shm"} {
		if got, err := ParseMount("dst=" + at); err != nil || got.Destination != "/dev/shm" {
			t.Errorf("%s: got %+v, %v", at, got, err)
		}
	}
	for _, bad := range []string{"", "type=bind", "dst=/b,owner=me"} {
		if _, err := ParseMount(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func TestBars(t *testing.T) {
	got := Bars(specs.Mount{Options: []string{"rbind", "rprivate", "rro", "noexec", "rnodev", "norelatime"}})
	if want := []string{"ro", "nodev", "noexec"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
