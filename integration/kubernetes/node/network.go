// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// network is the pods' own: a bridge and a range of addresses. It needs no packet
// filter, so pods reach the node and each other, and nothing else.
type network struct {
	bridge string
	subnet string
}

// newNetwork chooses a range that the machine does not use.
func newNetwork() (network, error) {
	used, err := net.InterfaceAddrs()
	if err != nil {
		return network{}, fmt.Errorf("choose addresses for pods: %w", err)
	}
	seed := fnv.New32a()
	fmt.Fprint(seed, os.Getpid())
	for try := range uint32(4096) {
		k := (seed.Sum32() + try) % 4096
		_, subnet, err := net.ParseCIDR(fmt.Sprintf("10.%d.%d.0/24", 200+k/256, k%256))
		if err != nil {
			return network{}, fmt.Errorf("choose addresses for pods: %w", err)
		}
		if free(subnet, used) {
			return network{bridge: fmt.Sprintf("gpuckpt%d", k), subnet: subnet.String()}, nil
		}
	}
	return network{}, errors.New("choose addresses for pods: all are in use")
}

func free(subnet *net.IPNet, used []net.Addr) bool {
	for _, addr := range used {
		if other, ok := addr.(*net.IPNet); ok && (subnet.Contains(other.IP) || other.Contains(subnet.IP)) {
			return false
		}
	}
	return true
}

// write writes the configuration of the network's plugins.
func (n network) write(dir string) error {
	config := fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge", "bridge": %q, "isGateway": true, "ipMasq": false,
      "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q}]]}
    }
  ]
}
`, n.bridge, filepath.Join(cniDir(dir), "addresses"), n.subnet)
	err := os.MkdirAll(cniDir(dir), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(cniDir(dir), "10-pods.conflist"), []byte(config), 0o644)
	}
	if err != nil {
		return fmt.Errorf("configure the pods' network: %w", err)
	}
	return nil
}

// remove removes the bridge, which the plugin made with the first pod.
func (n network) remove() error {
	if _, err := net.InterfaceByName(n.bridge); err != nil {
		return nil
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("remove the bridge %s: %w", n.bridge, err)
	}
	defer unix.Close(fd)
	down, err := unix.NewIfreq(n.bridge)
	if err == nil {
		err = unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, down) // no flag: not up
	}
	if err == nil {
		var name *byte
		if name, err = unix.BytePtrFromString(n.bridge); err == nil {
			err = ioctlPointer(fd, unix.SIOCBRDELBR, name)
		}
	}
	if err != nil {
		return fmt.Errorf("remove the bridge %s: %w", n.bridge, err)
	}
	return nil
}
