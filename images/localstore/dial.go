// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package localstore

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
)

// dialLimit bounds the wait for containerd's socket.
const dialLimit = 10 * time.Second

// Dial connects to the containerd at a socket. It does not wait for a socket that is not there.
func Dial(address, namespace string) (*client.Client, error) {
	probe, err := net.DialTimeout("unix", strings.TrimPrefix(address, "unix://"), dialLimit) // the client dials when it is first used, and waits
	if err == nil {
		err = probe.Close()
	}
	var c *client.Client
	if err == nil {
		c, err = client.New(address, client.WithDefaultNamespace(namespace), client.WithTimeout(dialLimit))
	}
	if err == nil {
		return c, nil
	}
	hint := " (--address, or $CONTAINERD_ADDRESS, names another)"
	if errors.Is(err, fs.ErrPermission) {
		hint = "" // another user is what helps
	}
	return nil, fmt.Errorf("reach containerd at %s%s: %w", address, hint, err)
}
