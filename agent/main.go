// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command gpuckpt-agent runs on each node of a cluster and does what Checkpoint objects ask for, of
// the pods of its node. It asks the node's kubelet for the checkpoint; the node's gpuckpt makes the
// image and pushes it.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/manager"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/node"
)

const account = "/var/run/secrets/kubernetes.io/serviceaccount/"

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "gpuckpt-agent:", err)
		os.Exit(1)
	}
}

func run() error {
	n := node.Node{TokenFile: account + "token"}
	name := flag.String("node", os.Getenv("NODE_NAME"), "the node's name ($NODE_NAME)")
	flag.StringVar(&n.Root, "root", "/host", "where the node's root is mounted")
	flag.StringVar(&n.Kubelet, "kubelet", "https://"+os.Getenv("NODE_IP")+":10250", "the kubelet's address; $NODE_IP by default")
	flag.StringVar(&n.CAFile, "kubelet-ca", account+"ca.crt", "authority of the kubelet's certificate")
	flag.BoolVar(&n.Insecure, "kubelet-insecure", false, "ask a kubelet whose certificate nobody has signed")
	flag.StringVar(&n.Containerd, "containerd", "/run/containerd/containerd.sock", "containerd's socket on the node")
	flag.StringVar(&n.Program, "gpuckpt", "", "gpuckpt on the node (default: where it was installed)")
	flag.BoolVar(&n.PlainHTTP, "plain-http", false, "talk HTTP to registries")
	flag.Func("env", "KEY=VALUE for the node's gpuckpt; once for each", func(v string) error {
		n.Env = append(n.Env, v)
		return nil
	})
	flag.Parse()
	if *name == "" {
		return errors.New("--node is not given")
	}
	ctrl.SetLogger(klog.Background())
	scheme := runtime.NewScheme()
	if err := errors.Join(api.AddTo(scheme), corev1.AddToScheme(scheme)); err != nil {
		return err
	}
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	m, err := ctrl.NewManager(config, manager.Options{Scheme: scheme, Metrics: server.Options{BindAddress: "0"}})
	if err != nil {
		return err
	}
	c := &controller{
		client: m.GetClient(), direct: m.GetAPIReader(), events: m.GetEventRecorderFor("gpuckpt"), //nolint:staticcheck // the newer one has no messages
		node: *name, work: n, now: time.Now,
	}
	if err := ctrl.NewControllerManagedBy(m).Named("checkpoint").For(&api.Checkpoint{}).Complete(c); err != nil {
		return err
	}
	return m.Start(ctrl.SetupSignalHandler())
}
