// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package freeport

import (
	"net"
	"testing"
)

func TestRow(t *testing.T) {
	port, err := Row(2)
	if err != nil {
		t.Fatal(err)
	}
	if claim(port) || claim(port+1) {
		t.Error("a port is given out twice")
	}
	for _, network := range []string{"udp4", "tcp4", "tcp6"} {
		if inUse(port) {
			t.Fatalf("port %d is in use before", port)
		}
		var c interface{ Close() error }
		if network == "udp4" {
			c, err = net.ListenUDP(network, &net.UDPAddr{Port: port})
		} else {
			c, err = net.ListenTCP(network, &net.TCPAddr{Port: port})
		}
		if err != nil {
			t.Fatal(err)
		}
		if !inUse(port) {
			t.Errorf("port %d is not seen in use by %s", port, network)
		}
		c.Close()
	}
}
