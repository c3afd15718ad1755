// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"io"
	"net"
	"testing"
)

// An established TCP connection does not hinder a checkpoint. In another pod one whose two ends are
// in the container is open, by the new pod's address, and one to elsewhere is closed; where the pod
// asks for it both are.
func TestTCP(t *testing.T) {
	results.Add(t)
	peer, err := net.Listen("tcp", net.JoinHostPort(shared(t).IP(), "0"))
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
	name := podName(t)
	old := apply(t, shared(t), name+"-old", counter{workload: "loop", args: []string{"--interface", "eth0", "--peer", peer.Addr().String()}})
	if got := ask(t, old, counterPort, "count"); got != "101 open peer open" {
		t.Fatalf("it answers %q", got)
	}
	archive, err := shared(t).Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
	if err != nil {
		t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
	}
	if got := ask(t, old, counterPort, "count"); got != "102 open peer open" {
		t.Errorf("after the checkpoint it answers %q", got)
	}
	ref := publish(t, shared(t), archive, name+":1")
	secrets := map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}}
	each := apply(t, shared(t), name+"-each", counter{image: ref, annotations: restoring, pod: secrets})
	if got := ask(t, each, counterPort, "count"); got != "102 open peer closed" {
		t.Errorf("in another pod it answers %q", got)
	}
	if each.Status.PodIP == old.Status.PodIP {
		t.Errorf("both pods have the address %s", each.Status.PodIP)
	}
	closed := apply(t, shared(t), name+"-closed", counter{image: ref, pod: secrets, annotations: map[string]string{
		"dev.gpuckpt.restore": "true", "dev.gpuckpt.criu.tcp-close": "true",
	}})
	if got := ask(t, closed, counterPort, "count"); got != "102 closed peer closed" {
		t.Errorf("in a pod that asks for closed connections it answers %q", got)
	}
}
