// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Namespace is the containerd namespace that CRI's containers are in.
const Namespace = "k8s.io"

// Options say how a node is started. Bins is needed, and GPU for pods with GPUs.
type Options struct {
	Bins harness.Bins
	GPU  harness.GPU
	// Dir is the directory in which the instance's own is made, as of
	// harness.Options.
	Dir string
	// ShimConfig is the shim's configuration.
	ShimConfig string
	// Runtime is the handler that pods run with when they name none; empty for
	// ByPath.
	Runtime string
	// KubeletConfig is further YAML for the kubelet's configuration, and
	// ContainerdConfig further TOML for containerd's.
	KubeletConfig, ContainerdConfig string
	// Runtimes is TOML in place of the two runtimes that a node has else.
	Runtimes string
	// APIServer starts an API server as well, so that pods can be run by kubectl
	// and have secrets, accounts and runtime classes.
	APIServer bool
	// Controllers starts Kubernetes' controllers beside the API server. They make and keep what
	// manifests ask for, so most tests do without.
	Controllers bool
	// KubeletAsks has the kubelet ask the API server who a client is and what it may, as kubelets do.
	// Without, clients need a certificate, and may everything.
	KubeletAsks bool
	// Join makes it another node of the cluster of that one, which has an API server and outlives it.
	// Its name is JoinedName, or Name.
	Join *Node
	Name string
	// Machine makes the node a machine of its own: containerd's and the kubelet's paths are those of any
	// node, its network is its own, and nothing on it is this project's. Pods find the API server and
	// the registry as in any cluster. All nodes of a cluster are, or none.
	Machine bool
	// Logf gets a line about each notable thing; nil drops them.
	Logf func(format string, args ...any)
}

// Node is one running node. Its methods may be called from several goroutines.
type Node struct {
	*harness.Containerd

	opts      Options
	authority *authority
	network   *network
	cluster   *network   // what the machines of a cluster are connected by; nil without
	api       *apiServer // nil for a node without
	managers  *process   // the controllers, nil for a node without
	kubelet   *kubelet
	plugin    *devicePlugin
	registry  *Registry

	stopOnce sync.Once
	stopErr  error
}

// Start starts a node. On error nothing of it stays, and the error holds the end of
// the kubelet's and of containerd's log.
func Start(ctx context.Context, opts Options) (_ *Node, err error) {
	if opts.Logf == nil {
		opts.Logf = func(string, ...any) {}
	}
	if opts.Runtime == "" {
		opts.Runtime = ByPath
	}
	n := &Node{opts: opts}
	if opts.Join != nil {
		n.authority, n.registry, n.api, n.cluster = opts.Join.authority, opts.Join.registry, opts.Join.api, opts.Join.cluster
	}
	config, err := n.criConfig()
	if err != nil {
		return nil, err
	}
	if n.network = n.cluster; n.network == nil {
		if n.network, err = makeNetwork(); err != nil {
			return nil, err
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("%w\nthe kubelet's log:\n%s", err, n.KubeletLog(2000)), n.Stop())
		}
	}()
	if opts.Machine {
		if opts.Join == nil {
			n.cluster = n.network
			if err := n.cluster.uplinked(); err != nil {
				return nil, err
			}
		}
		if n.network, err = n.cluster.next(); err != nil {
			return nil, err
		}
	}
	n.Containerd, err = harness.Start(ctx, harness.Options{
		Bins: opts.Bins, GPU: opts.GPU, Dir: opts.Dir, ShimConfig: opts.ShimConfig, Logf: opts.Logf,
		CRI: true, Namespace: Namespace, ConfigIn: config, Config: opts.ContainerdConfig, Machine: opts.Machine,
	})
	if err != nil {
		return nil, err
	}
	if opts.Machine {
		if err := n.network.connect(n.MachinePid()); err != nil {
			return nil, err
		}
	}
	if err := n.prepare(ctx); err != nil {
		return nil, err
	}
	if opts.Join != nil {
		if _, err := n.writeKubeconfig(adminUser); err != nil {
			return nil, err
		}
	} else if opts.APIServer {
		if n.api, err = n.startAPIServer(ctx); err != nil {
			return nil, err
		}
		if _, err := n.writeKubeconfig(adminUser); err != nil {
			return nil, err
		}
		if err := n.establish(ctx); err != nil {
			return nil, err
		}
	}
	if opts.Controllers {
		if n.managers, err = n.startControllers(); err != nil {
			return nil, err
		}
	}
	if n.kubelet, err = n.startKubelet(ctx); err != nil {
		return nil, err
	}
	if len(opts.GPU.Devices) > 0 {
		if n.plugin, err = n.startDevicePlugin(ctx); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// prepare makes what containerd needs to run pods: images, networks, devices, and
// the cgroup that they will be in.
func (n *Node) prepare(ctx context.Context) error {
	var err error
	if n.opts.Join == nil {
		if n.authority, err = newAuthority(filepath.Join(n.Dir(), "certificates")); err != nil {
			return err
		}
		if err := n.authority.issue(adminUser, "admin", []string{"system:masters"}); err != nil {
			return err
		}
		if n.registry, err = n.startRegistry(); err != nil {
			return err
		}
	}
	if err := n.network.write(n.Dir()); err != nil {
		return err
	}
	specs := cdiDir(n.Dir())
	if n.opts.Machine {
		specs = n.InMachine("/etc/cdi")
	}
	if err := n.WriteCDISpec(specs); err != nil {
		return err
	}
	if n.opts.Machine {
		err = n.furnish()
	} else {
		err = n.registry.trust(n.Dir())
	}
	if err != nil {
		return err
	}
	if err := n.importPause(ctx); err != nil {
		return err
	}
	if err := n.ImportWorkload(ctx); err != nil {
		return err
	}
	return makeCgroup(n.Cgroup())
}

// importPause imports the image of the containers that hold pods' namespaces.
func (n *Node) importPause(ctx context.Context) error {
	program, err := n.opts.Bins.Path("gpuwork")
	if err != nil {
		return err
	}
	img, err := harness.BuildImage(ctx, harness.ImageSpec{
		Files:      map[string]string{"/pause": program},
		Entrypoint: []string{"/pause", "sleep"},
	})
	if err != nil {
		return err
	}
	return n.Import(ctx, pauseImage, img)
}

// IP is the node's own address, which pods with the host's network have too.
func (n *Node) IP() string { return n.network.gateway }

// Name is the node's name in its cluster.
func (n *Node) Name() string {
	if n.opts.Join != nil {
		return cmp.Or(n.opts.Name, JoinedName)
	}
	return Name
}

// Registry is the node's registry.
func (n *Node) Registry() *Registry { return n.registry }

// KubeletLog returns the last bytes of the kubelet's log, size at most.
func (n *Node) KubeletLog(size int) string {
	if n.kubelet == nil {
		return ""
	}
	return n.kubelet.tail(size)
}

// Stop ends the node and removes what there is of it. It can be called more than
// once, and returns when all is done.
func (n *Node) Stop() error {
	n.stopOnce.Do(func() {
		var errs []error
		n.plugin.stop()
		n.managers.stop()
		if n.kubelet != nil {
			n.kubelet.stop()
		}
		if n.opts.Join == nil {
			n.api.stop()
		}
		if n.Containerd != nil {
			errs = append(errs, n.Containerd.Stop())
		}
		if n.opts.Join == nil {
			errs = append(errs, n.registry.close())
		}
		if n.opts.Join == nil {
			errs = append(errs, n.cluster.remove())
		}
		errs = append(errs, n.network.remove())
		n.stopErr = errors.Join(errs...)
	})
	return n.stopErr
}
