// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/registryserver"
)

// The network of the nodes, in this program's own network namespace.
const (
	nodesBridge  = "nodes"
	nodesNetwork = "10.77.0."
	nodesAddress = nodesNetwork + "1" // the registry's
	mirrorPort   = "5000"
)

// nodesCase is nodes that restore one checkpoint image at once. Each is a containerd with a network
// of its own, joined by a bridge to a registry and to the racks' pull-through registries.
type nodesCase struct {
	b       *bench
	rates   nodeRates
	dir     string
	server  *registryserver.Server
	nodes   []*harness.Containerd
	mirrors []*mirror
	size    uint64
	bytes   uint64 // that a node alone fetches
	ref     string
	port    int
}

// nodeRates are bytes a second: of what the registry sends of blobs in all, of a rack's registry each way, and
// of what a node gets.
type nodeRates struct{ registry, rack, node uint64 }

// parseNodeRates reads three rates.
func parseNodeRates(list string) (nodeRates, error) {
	all, err := parseRates(list)
	if err != nil || len(all) != 3 || slices.Contains(all, 0) {
		return nodeRates{}, fmt.Errorf("--node-rates: %q are not three rates such as 40MB,40MB,40MB", list)
	}
	return nodeRates{all[0], all[1], all[2]}, nil
}

// measureNodes measures each count of nodes in all ways, round by round.
func (cmd *command) measureNodes(ctx context.Context, b *bench, r *report.Results, size uint64) (err error) {
	dir, err := os.MkdirTemp(b.dirs[report.OnTmpfs], "nodes")
	if err != nil {
		return fmt.Errorf("make a directory for nodes: %w", err)
	}
	n := &nodesCase{b: b, size: size, rates: cmd.nodeRates, dir: dir}
	defer func() { err = errors.Join(err, n.close(), os.RemoveAll(dir)) }()
	if err := n.start(ctx, slices.Max(cmd.nodes)); err != nil {
		return err
	}
	if err := n.send(ctx); err != nil {
		return err
	}
	// The first restore does not count: it tells what a node fetches.
	first := n.run(0, report.OneRegistry, 1, 1)
	if err := n.once(ctx, &first); err != nil {
		return err
	}
	n.bytes = first.Sent
	for round := range b.rounds {
		for _, count := range cmd.nodes {
			for _, way := range []string{report.OneRegistry, report.ColdRacks, report.WarmRacks} {
				n.measure(ctx, r, n.run(round, way, count, min(count, cmd.racks)))
			}
		}
		two := n.run(round, report.OneRegistry, 1, 1)
		two.PerNode = 2
		n.measure(ctx, r, two)
	}
	return nil
}

// run is a run to be made.
func (n *nodesCase) run(round int, way string, nodes, racks int) report.NodesRun {
	if way == report.OneRegistry {
		racks = 0
	}
	return report.NodesRun{
		ImageOutcome: report.ImageOutcome{Size: n.size, Round: round + 1}, Way: way, Nodes: nodes, PerNode: 1, Racks: racks, Bytes: n.bytes,
		RegistryRate: n.rates.registry, RackRate: n.rates.rack, NodeRate: n.rates.node,
	}
}

// measure makes a run, if there is time.
func (n *nodesCase) measure(ctx context.Context, r *report.Results, o report.NodesRun) {
	if ctx.Err() != nil || time.Now().After(n.b.end) {
		n.b.notRun = append(n.b.notRun, o.Name()+": the time is over")
		return
	}
	began := time.Now()
	if err := n.once(ctx, &o); err != nil {
		o.Error = err.Error()
		n.b.logf("%s: FAILED: %s", o.Name(), o.Error)
	} else {
		o.Verified = true
		n.b.logf("%s: the last runs after %s, the registry sent %s, verified", o.Name(), report.Seconds(o.Last()), report.RoundSize(float64(o.Sent)))
	}
	o.Whole = time.Since(began).Seconds()
	r.NodesRuns = append(r.NodesRuns, o)
}

// start starts the network, the registry and so many nodes.
func (n *nodesCase) start(ctx context.Context, count int) (err error) {
	for _, args := range [][]string{
		{"link", "add", nodesBridge, "address", harness.BridgeAddress, "type", "bridge"},
		{"address", "add", nodesAddress + "/24", "dev", nodesBridge}, {"link", "set", nodesBridge, "up"},
	} {
		if err := harness.Program("ip", args...); err != nil {
			return fmt.Errorf("make a network for nodes: %w", err)
		}
	}
	if n.server, err = registryserver.StartAt(nodesAddress, n.dir); err != nil {
		return err
	}
	for i := range count {
		c, err := harness.Start(ctx, harness.Options{Bins: n.b.c.Bins(), GPU: n.b.c.GPU(), Dir: n.dir, Machine: true})
		if err != nil {
			return err
		}
		n.nodes = append(n.nodes, c)
		device, err := harness.Connect(c.MachinePid(), nodesBridge, nodesNetwork+strconv.Itoa(10+i)+"/24")
		if err == nil {
			err = limit(nil, device, n.rates.node)
		}
		config := c.InMachine("/etc/gpuckpt/config.toml")
		if err == nil {
			err = os.MkdirAll(filepath.Dir(config), 0o755)
		}
		if err == nil {
			err = os.WriteFile(config, []byte(shimConfig(c, "staging", n.b.settings)), 0o600)
		}
		if err := errors.Join(err, c.WriteCDISpec(c.InMachine("/etc/cdi")), c.ImportWorkload(ctx)); err != nil {
			return fmt.Errorf("start the node %d: %w", i+1, err)
		}
	}
	return nil
}

// limit has a device send so many bytes a second, in the network namespace that a command enters.
func limit(enter []string, device string, rate uint64) error {
	args := append(slices.Clone(enter), "tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", strconv.FormatUint(rate, 10)+"bps", "burst", "512kb", "latency", "50ms")
	return harness.Program(args[0], args[1:]...)
}

func (n *nodesCase) close() (err error) {
	n.stopMirrors()
	for _, c := range n.nodes {
		err = errors.Join(err, c.Stop())
	}
	if n.server != nil {
		err = errors.Join(err, n.server.Close(), harness.Program("ip", "link", "del", nodesBridge))
	}
	return err
}

// send makes an image on the first node and pushes it. Then no node has it, and all have the first one's key.
func (n *nodesCase) send(ctx context.Context) error {
	of, err := newWorkload(report.Shape{Content: report.ContentPattern, Size: n.size, Procs: 1, GPUs: 1, Media: report.OnTmpfs, Mode: report.ModeExit})
	if err != nil {
		return err
	}
	c := n.nodes[0]
	k, err := c.Run(ctx, harness.RunSpec{ID: "nodes", GPUs: []int{0}, OwnNetwork: true, Args: append([]string{"gpuwork"}, of.args()...)})
	if err != nil {
		return err
	}
	n.port, n.ref = of.port, n.server.Ref("job:1")
	if err := countsInside(ctx, k, n.port, "101"); err != nil {
		return err
	}
	if err := c.Gpuckpt(ctx, &struct{}{}, "checkpoint", k.ID, "--image", n.ref); err != nil {
		return err
	}
	if err := c.Gpuckpt(ctx, &struct{}{}, "image", "push", "--plain-http", n.ref); err != nil {
		return err
	}
	key, err := os.ReadFile(c.SigningKey())
	if err != nil {
		return fmt.Errorf("read the key of a node: %w", err)
	}
	for _, other := range n.nodes[1:] {
		if err := os.WriteFile(other.SigningKey(), key, 0o600); err != nil {
			return fmt.Errorf("copy the key of a node: %w", err)
		}
	}
	return errors.Join(k.Remove(ctx), c.ForgetImages(ctx))
}

// once makes a run: so many restores begin at once. Afterwards no node has anything of the image. The racks'
// registries stay, for the next run.
func (n *nodesCase) once(ctx context.Context, r *report.NodesRun) (err error) {
	bytes := imageCopies * float64(n.size) * float64(r.Nodes)
	ctx, cancel := context.WithTimeout(ctx, runLimit+time.Duration(bytes/float64(min(r.RegistryRate, r.RackRate, r.NodeRate))*float64(time.Second)))
	defer cancel()
	switch r.Way {
	case report.OneRegistry:
		n.stopMirrors()
	case report.ColdRacks:
		n.stopMirrors()
		for i := range r.Racks {
			if err := n.startMirror(ctx, i); err != nil {
				return err
			}
		}
	case report.WarmRacks:
		if len(n.mirrors) != r.Racks {
			return errors.New("the racks' registries have nothing: the run before failed")
		}
	}
	restored := make([]*harness.Container, r.Nodes*r.PerNode)
	r.Running = make([]float64, len(restored))
	for i := range restored {
		n.b.serial++
		restored[i] = n.nodes[i%r.Nodes].Adopt(fmt.Sprintf("nodes-%d", n.b.serial), n.port)
		if err := n.route(i % r.Nodes); err != nil {
			return err
		}
	}
	n.server.Limit(r.RegistryRate)
	defer n.server.Limit(0)
	group, inTime := errgroup.WithContext(ctx)
	began := time.Now()
	for i, k := range restored {
		group.Go(func() error {
			return n.nodes[i%r.Nodes].Gpuckpt(inTime, &struct{}{}, "restore", n.ref, "--pull", "--plain-http", "--name", k.ID, "--gpus", "0", "--snapshotter", n.nodes[i%r.Nodes].Snapshotter())
		})
		group.Go(func() error {
			err := answersFirst(inTime, k, n.port)
			r.Running[i] = time.Since(began).Seconds()
			return err
		})
	}
	err = group.Wait()
	r.Sent = n.server.Sent()
	slowest := slices.Index(r.Running, slices.Max(r.Running))
	if line, lerr := n.nodes[slowest%r.Nodes].Timeline(restored[slowest].ID); lerr == nil {
		r.Phases = line.Phases
	}
	slices.Sort(r.Running)
	clean := context.WithoutCancel(ctx)
	for i, k := range restored {
		if err == nil {
			err = countsInside(ctx, k, n.port, "102")
		}
		if err != nil {
			err = fmt.Errorf("%w\nthe end of containerd's log:\n%s", err, n.nodes[i%r.Nodes].LogTail(2000))
		}
		err = errors.Join(err, k.Remove(clean))
	}
	for _, c := range n.nodes[:r.Nodes] {
		err = errors.Join(err, c.ForgetImages(clean))
	}
	return err
}

// answersFirst waits until a container that is going to be there answers.
func answersFirst(ctx context.Context, k *harness.Container, port int) error {
	for {
		pid, err := k.Pid(ctx)
		if err == nil {
			_, err = askInside(ctx, pid, port, "info")
		}
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s: %w", k.ID, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// route has a node fetch from the registry of its rack, or if there are none from the registry itself.
func (n *nodesCase) route(node int) error {
	host := strings.TrimSuffix(n.server.Ref(""), "/")
	hosts := fmt.Sprintf("server = \"http://%s\"\n", host)
	if len(n.mirrors) > 0 {
		hosts += fmt.Sprintf("[host.\"http://%s\"]\ncapabilities = [\"pull\", \"resolve\"]\n", n.mirrors[node%len(n.mirrors)].address)
	}
	dir := n.nodes[node].InMachine("/etc/containerd/certs.d/" + host)
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "hosts.toml"), []byte(hosts), 0o644)
	}
	if err != nil {
		return fmt.Errorf("name the node's registry: %w", err)
	}
	return nil
}

// mirror is distribution's registry as a pull-through cache, empty at first, in a network of its own.
type mirror struct {
	cmd     *exec.Cmd
	address string
	dir     string
}

// startMirror starts the registry of a rack, and returns when it listens.
func (n *nodesCase) startMirror(ctx context.Context, rack int) error {
	host := nodesNetwork + strconv.Itoa(200+rack)
	m := &mirror{address: net.JoinHostPort(host, mirrorPort)}
	var err error
	if m.dir, err = os.MkdirTemp(n.dir, "mirror"); err != nil {
		return fmt.Errorf("start a rack's registry: %w", err)
	}
	n.mirrors = append(n.mirrors, m)
	config := filepath.Join(m.dir, "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\nstorage: {filesystem: {rootdirectory: %s}}\nproxy: {remoteurl: 'http://%s'}\nhttp: {addr: ':%s'}\n",
		filepath.Join(m.dir, "blobs"), strings.TrimSuffix(n.server.Ref(""), "/"), mirrorPort)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		return fmt.Errorf("start a rack's registry: %w", err)
	}
	// It asks the registry at once, so it is begun when it has its network.
	if m.cmd, err = n.nodes[0].Command(context.WithoutCancel(ctx), "registry", "serve", config); err != nil {
		return fmt.Errorf("%w; run hack/setup imagetools", err)
	}
	m.cmd.Args = append([]string{"sh", "-c", `read _ && exec "$@"`, "sh", m.cmd.Path}, m.cmd.Args[1:]...)
	m.cmd.Path, m.cmd.Env = "/bin/sh", append(m.cmd.Env, "OTEL_TRACES_EXPORTER=none")
	m.cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	log, err := os.Create(filepath.Join(m.dir, "log"))
	if err != nil {
		return fmt.Errorf("start a rack's registry: %w", err)
	}
	defer log.Close()
	m.cmd.Stdout, m.cmd.Stderr = log, log
	begin, err := m.cmd.StdinPipe()
	if err == nil {
		err = m.cmd.Start()
	}
	if err != nil {
		return fmt.Errorf("start a rack's registry: %w", err)
	}
	pid := m.cmd.Process.Pid
	device, err := harness.Connect(pid, nodesBridge, host+"/24")
	if err == nil {
		err = errors.Join(limit(nil, device, n.rates.rack), limit([]string{"nsenter", "--target", strconv.Itoa(pid), "--net"}, "eth0", n.rates.rack))
	}
	if err == nil {
		_, err = io.WriteString(begin, "\n")
	}
	if err != nil {
		return fmt.Errorf("start a rack's registry: %w", err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.DialTimeout("tcp", m.address, time.Second)
		if err == nil {
			return c.Close()
		}
		if time.Now().After(deadline) {
			said, _ := os.ReadFile(log.Name())
			return fmt.Errorf("wait for a rack's registry: %w\n%s", err, said)
		}
	}
}

// stopMirrors ends the racks' registries and removes what they have.
func (n *nodesCase) stopMirrors() {
	for _, m := range n.mirrors {
		if m.cmd != nil && m.cmd.Process != nil {
			_ = m.cmd.Process.Kill()
			_ = m.cmd.Wait() // by the signal
		}
		_ = os.RemoveAll(m.dir) // at the latest with all of the nodes
	}
	n.mirrors = nil
}
