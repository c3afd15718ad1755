// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package rootfs

import (
	"reflect"
	"testing"

	taskAPI "github.com/containerd/containerd/api/runtime/task/v3"
	"github.com/containerd/containerd/api/types"
)

func TestOf(t *testing.T) {
	overlay := func(options ...string) *types.Mount { return &types.Mount{Type: "overlay", Options: options} }
	for name, c := range map[string]struct {
		mounts []*types.Mount
		want   []string
	}{
		"overlay":         {[]*types.Mount{overlay("index=off", "workdir=/s/3/work", "upperdir=/s/3/fs", "lowerdir=/s/2/fs:/s/1/fs")}, []string{"/s/2/fs", "/s/1/fs"}},
		"bind":            {[]*types.Mount{{Type: "bind", Source: "/s/1", Options: []string{"rbind"}}}, []string{"/s/1"}},
		"none":            {nil, []string{"/bundle/rootfs"}},
		"a block device":  {[]*types.Mount{{Type: "ext4", Source: "/dev/mapper/x"}}, nil},
		"two mounts":      {[]*types.Mount{{Type: "erofs"}, overlay("lowerdir=/a")}, nil},
		"escaped":         {[]*types.Mount{overlay(`lowerdir=/a\:b`)}, nil},
		"data only":       {[]*types.Mount{overlay("lowerdir=/a::/b")}, nil},
		"one by one":      {[]*types.Mount{overlay("lowerdir+=/a", "lowerdir+=/b")}, nil},
		"relative":        {[]*types.Mount{overlay("lowerdir=a:b")}, nil},
		"no lower":        {[]*types.Mount{overlay("upperdir=/a")}, nil},
		"several options": {[]*types.Mount{overlay("lowerdir=/a", "lowerdir=/b")}, []string{"/a", "/b"}},
	} {
		got := Of(&taskAPI.CreateTaskRequest{Bundle: "/bundle", Rootfs: c.mounts}, "rootfs")
		if !reflect.DeepEqual(got.Dirs, c.want) || len(c.mounts) > 0 && c.want == nil && len(got.mounts) != len(c.mounts) {
			t.Errorf("%s: got %+v", name, got)
		}
	}
}
