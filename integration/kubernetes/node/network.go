// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// network is the pods' own: a bridge, a range of addresses, and the node's own
// address among them. It needs no packet filter, so pods reach the node and each
// other, and nothing else. A machine's pods also reach those of the cluster's other machines.
type network struct {
	bridge  string
	gateway string // the node's address
	subnet  string
	// pods is, on a machine, where pods are instead: behind its address. bridge and subnet are then
	// what the cluster's machines are connected by, and uplink the address of the test there.
	pods, uplink string
	machines     int // of the cluster, on its first node
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

// serviceIP is where pods find the API server of a cluster of machines: the first address of the range
// of services. There is no proxy for services; the test has the address.
const serviceIP = "10.96.0.1"

// uplinked makes the network of a cluster of machines out of a bridge: the test has the bridge's own
// address, that of the API server, and forwards.
func (n *network) uplinked() error {
	n.uplink = n.gateway
	if err := os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0); err != nil {
		return fmt.Errorf("connect machines: %w", err)
	}
	if err := harness.Program("ip", "link", "set", n.bridge, "address", harness.BridgeAddress); err != nil {
		return fmt.Errorf("connect machines: %w", err)
	}
	return harness.Program("ip", "address", "replace", serviceIP+"/32", "dev", n.bridge)
}

// next returns the network of another machine of the cluster.
func (n *network) next() (*network, error) {
	n.machines++
	prefix, _, err := net.ParseCIDR(n.subnet)
	if err != nil {
		return nil, fmt.Errorf("connect a machine: %w", err)
	}
	four := prefix.To4()
	return &network{
		bridge: n.bridge, subnet: n.subnet, uplink: n.uplink,
		gateway: net.IPv4(four[0], four[1], four[2], byte(10+n.machines)).String(),
		pods:    fmt.Sprintf("10.244.%d", n.machines),
	}, nil
}

// connect connects a machine to the cluster's bridge.
func (n *network) connect(pid int) error {
	_, err := harness.Connect(pid, n.bridge, n.gateway+"/24")
	if err == nil {
		err = harness.Program("nsenter", "--target", strconv.Itoa(pid), "--net", "ip", "route", "add", "default", "via", n.uplink)
	}
	if err == nil {
		err = harness.Program("ip", "route", "replace", n.pods+".0/24", "via", n.gateway)
	}
	return err
}

// remove removes the bridge. What a machine has goes with its network namespace.
func (n *network) remove() error {
	if n == nil || n.pods != "" {
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
	bridge, subnet, gateway, routes := n.bridge, n.subnet, n.gateway, "[]"
	if n.pods != "" {
		bridge, subnet, gateway, routes = "pods", n.pods+".0/24", n.pods+".1", `[{"dst": "0.0.0.0/0"}]`
	}
	config := fmt.Sprintf(`{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {
      "type": "bridge", "bridge": %q, "isGateway": true, "ipMasq": false,
      "ipam": {"type": "host-local", "dataDir": %q, "ranges": [[{"subnet": %q, "gateway": %q}]], "routes": %s}
    }
  ]
}
`, bridge, filepath.Join(cniDir(dir), "addresses"), subnet, gateway, routes)
	err := os.MkdirAll(cniDir(dir), 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(cniDir(dir), "10-pods.conflist"), []byte(config), 0o644)
	}
	if err != nil {
		return fmt.Errorf("configure the pods' network: %w", err)
	}
	return nil
}
