// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"io"
	"net"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// A restore keeps a TCP connection open whose two ends are in the container, and closes one to
// another program; or does with both what the container asks for. That program hears nothing of the
// restore, and the container that runs on keeps its connection.
func TestConnections(t *testing.T) {
	results.Add(t)
	for _, test := range []struct {
		name        string
		annotations map[string]string
		want        string
	}{
		{"each", nil, "102 open peer closed"},
		{"all closed", map[string]string{"dev.gpuckpt.criu.tcp-close": "true"}, "102 closed peer closed"},
	} {
		t.Run(test.name, func(t *testing.T) {
			peer, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			go func() {
				for {
					c, err := peer.Accept()
					if err != nil {
						return
					}
					go io.Copy(io.Discard, c)
				}
			}()
			k := shared.Work(t, harness.RunSpec{GPUs: []int{0}, Annotations: test.annotations}, "loop", "--peer", peer.Addr().String())
			k.Expect(t, "count", "101 open peer open")
			ref := takeCheckpoint(t, shared, k, "1")
			k.Expect(t, "count", "102 open peer open")
			for range 3 {
				k.MustRemove(t)
				k = restore(t, shared, k.ID, ref, k.Port)
				k.Expect(t, "count", test.want)
			}
		})
	}
}
