// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package bundle

import (
	"reflect"
	"strings"
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

func TestUncovered(t *testing.T) {
	mounts := func(all string) (m []specs.Mount) {
		for at := range strings.FieldsSeq(all) {
			at, option, _ := strings.Cut(at, ",")
			m = append(m, specs.Mount{Destination: at, Options: []string{option}})
		}
		return m
	}
	for all, want := range map[string]string{
		"/a /b": "/a /b", "/dev /dev/shm /a /dev/shm/": "/dev /a /dev/shm/", "/a /a /a": "/a", "a /a/../a": "/a/../a",
		"/a /a/b /a": "/a /a/b /a", "/a /ab /a": "/ab /a", "/a /a,tmpcopyup": "/a /a,tmpcopyup", "/a /a,remount": "/a /a,remount",
	} {
		if got := Uncovered(mounts(all)); !reflect.DeepEqual(got, mounts(want)) {
			t.Errorf("%s: %v, want %s", all, got, want)
		}
	}
}

func TestBars(t *testing.T) {
	got := Bars(specs.Mount{Options: []string{"rbind", "rprivate", "rro", "noexec", "rnodev", "norelatime"}})
	if want := []string{"ro", "nodev", "noexec"}; !reflect.DeepEqual(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
