// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command gpuckpt-agent runs on each node of a cluster and does what Checkpoint objects ask for, of
// the pods of its node: the node's gpuckpt takes the checkpoint, makes the image and pushes it. With
// --controller it runs once in a cluster, on any node, and makes Checkpoints: for Migrations, by
// schedules, and of pods that end.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	_ "golang.org/x/crypto/x509roots/fallback" // of public authorities: the image has no certificates
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	runner "sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/cluster"
	"github.com/gpuckpt/gpuckpt/agent/hook"
	"github.com/gpuckpt/gpuckpt/agent/node"
	"github.com/gpuckpt/gpuckpt/agent/tell"
	"github.com/gpuckpt/gpuckpt/agent/turns"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "gpuckpt-agent:", err)
		os.Exit(1)
	}
}

func run() error {
	var n node.Node
	name := flag.String("node", os.Getenv("NODE_NAME"), "the node's name ($NODE_NAME)")
	flag.StringVar(&n.Root, "root", "/host", "where the node's root is mounted")
	flag.StringVar(&n.Containerd, "containerd", "/run/containerd/containerd.sock", "containerd's socket on the node")
	flag.StringVar(&n.Program, "gpuckpt", "", "gpuckpt on the node (default: where it was installed)")
	flag.BoolVar(&n.PlainHTTP, "plain-http", false, "talk HTTP to registries")
	flag.Func("env", "KEY=VALUE for the node's gpuckpt; once for each", func(v string) error {
		n.Env = append(n.Env, v)
		return nil
	})
	flag.StringVar(&n.Keys, "keys", "/var/lib/gpuckpt/keys", "directory of the node for the keys of the cluster's nodes, which [restore] keys of its configuration names")
	health := flag.String("health", "", "address that answers /healthz; empty: none")
	trust := flag.Bool("trust", true, "make the node's key known to the cluster, and have those of all its nodes trusted here")
	keep := flag.Duration("keep-keys", 30*24*time.Hour, "with --controller: how long the keys of a node that is gone are trusted")
	hooks := flag.String("hooks", "localhost:9403", "where preStop hooks of the node's pods are answered; empty: nowhere")
	central := flag.Bool("controller", false, "be the cluster's controller, not a node's agent")
	namespace := flag.String("lease-namespace", os.Getenv("NAMESPACE"), "where the agents are, and controllers agree on which of them works ($NAMESPACE); empty: there is one controller, and agents anywhere")
	remove := flag.String("uninstall-from", "", "have the DaemonSet gpuckpt-node of the namespace uninstall gpuckpt from all nodes, wait for that, and end")
	flag.Parse()
	if *name == "" && !*central && *remove == "" {
		return errors.New("--node is not given")
	}
	ctrl.SetLogger(klog.Background())
	scheme := runtime.NewScheme()
	if err := errors.Join(api.AddTo(scheme), corev1.AddToScheme(scheme), appsv1.AddToScheme(scheme)); err != nil {
		return err
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	if *remove != "" {
		c, err := client.New(config, client.Options{Scheme: scheme})
		if err != nil {
			return err
		}
		return fromNodes(ctrl.SetupSignalHandler(), c, *remove)
	}
	options := manager.Options{Scheme: scheme, Metrics: server.Options{BindAddress: "0"}, HealthProbeBindAddress: *health}
	if *central {
		options.LeaderElection, options.LeaderElectionID, options.LeaderElectionNamespace = *namespace != "", "gpuckpt-controller", *namespace
		options.LeaderElectionReleaseOnCancel = true
		options.Cache.DefaultTransform = cache.TransformStripManagedFields()
	}
	m, err := ctrl.NewManager(config, options)
	if err == nil {
		err = m.AddHealthzCheck("ping", healthz.Ping)
	}
	if err != nil {
		return err
	}
	answers := &hook.Server{Cluster: m.GetAPIReader(), Node: *name, Settle: 3 * time.Second}
	if *central {
		err = cluster.Add(m, cluster.Options{PlainHTTP: n.PlainHTTP, Namespace: *namespace, KeepKeys: *keep})
	} else {
		err = errors.Join(agent(m, n, *name, *hooks, answers), trusts(m, n, *name, *trust))
	}
	if err != nil {
		return err
	}
	return m.Start(answers.Outlive(ctrl.SetupSignalHandler()))
}

// agent has a manager do what is done on a node.
func agent(m manager.Manager, n node.Node, name, hooks string, answers http.Handler) error {
	c := &controller{
		client: m.GetClient(), direct: m.GetAPIReader(), events: m.GetEventRecorderFor("gpuckpt"), //nolint:staticcheck // the newer one has no messages
		node: name, work: n, now: time.Now,
	}
	if err := ctrl.NewControllerManagedBy(m).Named("checkpoint").For(&api.Checkpoint{}).WithOptions(runner.Options{MaxConcurrentReconciles: turns.AtOnce}).Complete(c); err != nil {
		return err
	}
	// A Checkpoint whose agent was killed may be over by now: the controller ends it while no agent is here.
	c.recovering.Add(1)
	if err := m.Add(manager.RunnableFunc(func(ctx context.Context) error {
		if err := n.Recover(ctx); err != nil {
			ctrl.Log.Error(err, "resume what killed checkpoints have left paused")
		}
		c.recovering.Done()
		wait.UntilWithContext(ctx, func(ctx context.Context) {
			if err := c.sweep(ctx); err != nil {
				ctrl.Log.Error(err, "remove images of Checkpoints that are over")
			}
		}, sweepEvery)
		return nil
	})); err != nil {
		return err
	}
	if err := m.Add(&tell.Teller{Root: n.Root, Socket: n.Containerd, Events: c.events, Pods: c.direct, Checkpointed: c.checkpointed}); err != nil {
		return err
	}
	if hooks == "" {
		return nil
	}
	listener, err := net.Listen("tcp", hooks)
	if err != nil {
		return fmt.Errorf("answer preStop hooks: %w", err)
	}
	return m.Add(&manager.Server{
		Name: "hooks", Listener: listener,
		Server: &http.Server{Handler: answers, ReadHeaderTimeout: time.Minute},
	})
}

// trusts has a manager keep the keys of the cluster's nodes. Without trust none of them counts.
func trusts(m manager.Manager, n node.Node, name string, trust bool) error {
	if !trust {
		return n.Trust(nil)
	}
	k := &keys{client: m.GetClient(), direct: m.GetAPIReader(), node: name, ring: n}
	return errors.Join(m.Add(k), ctrl.NewControllerManagedBy(m).Named("key").For(&api.NodeKey{}).Complete(k))
}
