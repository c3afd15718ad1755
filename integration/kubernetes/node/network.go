// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// network is the pods' own: a bridge, a range of addresses, and the node's own
// address among them. It needs no packet filter, so pods reach the node and each
// other, and nothing else.
type network struct {
	bridge  string
	gateway string // the node's address
	subnet  string
}

// makeNetwork makes a bridge with a range of addresses that the machine does not use.
func makeNetwork() (*network, error) {
	for try := range 4096 {
		k := (os.Getpid() + try) % 4096
		used, err := net.InterfaceAddrs()
		if err != nil {
			return nil, fmt.Errorf("choose addresses for pods: %w", err)
		}
		address, subnet, err := net.ParseCIDR(fmt.Sprintf("10.%d.%d.1/24", 200+k/256, k%256))
		if err != nil {
			return nil, fmt.Errorf("choose addresses for pods: %w", err)
		}
		if !free(subnet, used) {
			continue
		}
		n := &network{bridge: fmt.Sprintf("gpuckpt%d", k), gateway: address.String(), subnet: subnet.String()}
		err = n.makeBridge(address, subnet.Mask)
		if errors.Is(err, unix.EEXIST) {
			continue // another program has just made it
		}
		if err != nil {
			return nil, errors.Join(fmt.Errorf("make the bridge %s: %w", n.bridge, err), n.remove())
		}
		return n, nil
	}
	return nil, errors.New("choose addresses for pods: all are in use")
}

func free(subnet *net.IPNet, used []net.Addr) bool {
	for _, addr := range used {
		if other, ok := addr.(*net.IPNet); ok && (subnet.Contains(other.IP) || other.Contains(subnet.IP)) {
			return false
		}
	}
	return true
}

// makeBridge makes the bridge and gives it the node's address.
func (n *network) makeBridge(address net.IP, mask net.IPMask) error {
	return withSocket(func(fd int) error {
		if err := bridgeIoctl(fd, unix.SIOCBRADDBR, n.bridge); err != nil {
			return err
		}
		for _, set := range []struct {
			request uint
			value   []byte
		}{{unix.SIOCSIFADDR, address.To4()}, {unix.SIOCSIFNETMASK, mask}} {
			ifr, err := unix.NewIfreq(n.bridge)
			if err != nil {
				return err
			}
			if err := ifr.SetInet4Addr(set.value); err != nil {
				return err
			}
			if err := unix.IoctlIfreq(fd, set.request, ifr); err != nil {
				return err
			}
		}
		return setFlags(fd, n.bridge, unix.IFF_UP)
	})
}

// remove removes the bridge.
func (n *network) remove() error {
	if n == nil {
		return nil
	}
	if _, err := net.InterfaceByName(n.bridge); err != nil {
		return nil
	}
	err := withSocket(func(fd int) error {
		if err := setFlags(fd, n.bridge, 0); err != nil { // it must be down
			return err
		}
		return bridgeIoctl(fd, unix.SIOCBRDELBR, n.bridge)
	})
	if err != nil {
		return fmt.Errorf("remove the bridge %s: %w", n.bridge, err)
	}
	return nil
}

// withSocket calls do with a socket, which requests about interfaces go through.
func withSocket(do func(fd int) error) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return do(fd)
}

func setFlags(fd int, name string, flags uint16) error {
	ifr, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	ifr.SetUint16(flags)
	return unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr)
}

// write writes the configuration of the network's plugins.
func (n *network) write(dir string) error {
	config := fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge", "bridge": %q, "isGateway": true, "ipMasq": false,
      "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q, "gateway": %q}]]}
    }
  ]
}
`, n.bridge, filepath.Join(cniDir(dir), "addresses"), n.subnet, n.gateway)
	err := os.MkdirAll(cniDir(dir), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(cniDir(dir), "10-pods.conflist"), []byte(config), 0o644)
	}
	if err != nil {
		return fmt.Errorf("configure the pods' network: %w", err)
	}
	return nil
}
