// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command kubectl-gpuckpt is a plugin of kubectl's, which runs it as `kubectl gpuckpt`. It makes, shows and
// explains the objects of a cluster that has the agent, with the rights of the user and nothing else.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

const usage = `Checkpoint, restore and migrate GPU pods.

  kubectl gpuckpt checkpoint POD [--container NAME] [--to REPOSITORY[:TAG]] [--push-secret NAME] [--wait]
  kubectl gpuckpt restore CHECKPOINT [--like POD] [--name NAME] | kubectl apply -f -
  kubectl gpuckpt migrate POD [--to-node NODE] [--to REPOSITORY] [--push-secret NAME] [--wait]
  kubectl gpuckpt ls
  kubectl gpuckpt logs CHECKPOINT|MIGRATION|POD

Without --to the pod's annotations gpuckpt.dev/repository and gpuckpt.dev/push-secret are used.
`

// asked is what a command is told.
type asked struct {
	container, to, secret, name, node, like string
	wait                                    bool
}

// commands are run with the one argument that they have, if they have one.
var commands = map[string]struct {
	argument string
	flags    string // their names, separated by blanks
	run      func(p plugin, ctx context.Context, argument string, a asked) error
}{
	"checkpoint": {"POD", "container to push-secret name wait", plugin.checkpoint},
	"restore":    {"CHECKPOINT", "like name push-secret", plugin.restore},
	"migrate":    {"POD", "to-node to push-secret name wait", plugin.migrate},
	"ls":         {"", "", plugin.list},
	"logs":       {"CHECKPOINT, MIGRATION or POD", "", plugin.logs},
}

// plugin works in one namespace of a cluster.
type plugin struct {
	client    client.Client
	namespace string
	out, errs io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], connect, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// run runs a command, as kubectl's user calls it.
func run(ctx context.Context, args []string, connect func(clientcmd.ClientConfig) (client.Client, error), out, errs io.Writer) error {
	rules, overrides, a := clientcmd.NewDefaultClientConfigLoadingRules(), &clientcmd.ConfigOverrides{}, asked{}
	flags := pflag.NewFlagSet("kubectl gpuckpt", pflag.ContinueOnError)
	flags.SetOutput(errs)
	flags.Usage = func() { fmt.Fprint(out, usage+"\n"+flags.FlagUsages()) }
	flags.StringVarP(&a.container, "container", "c", "", "one container of the pod; all that run, by default")
	flags.StringVar(&a.to, "to", "", "where the image goes: a repository, and a tag if it is not the object's name")
	flags.StringVar(&a.secret, "push-secret", "", "the secret to push with, of type kubernetes.io/dockerconfigjson; the new pod pulls with it")
	flags.StringVar(&a.name, "name", "", "name of the object, or of the pod that restore prints")
	flags.StringVar(&a.node, "to-node", "", "the node to go to; any other, by default")
	flags.StringVar(&a.like, "like", "", "the pod whose specification the new one gets; the checkpoint's, by default")
	flags.BoolVar(&a.wait, "wait", false, "show the stages, and wait for the end")
	own := strings.Fields("container to push-secret name to-node like wait")
	flags.StringVar(&rules.ExplicitPath, "kubeconfig", "", "the configuration to use")
	clientcmd.BindOverrideFlags(overrides, flags, clientcmd.RecommendedConfigOverrideFlags(""))
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return nil
		}
		return err
	}
	if flags.NArg() == 0 {
		return fmt.Errorf("name a command\n\n%s", usage)
	}
	command, ok := commands[flags.Arg(0)]
	if !ok {
		return fmt.Errorf("%q is no command\n\n%s", flags.Arg(0), usage)
	}
	for _, name := range own {
		if flags.Changed(name) && !strings.Contains(" "+command.flags+" ", " "+name+" ") {
			return fmt.Errorf("%s has no flag --%s", flags.Arg(0), name)
		}
	}
	if command.argument == "" && flags.NArg() > 1 {
		return fmt.Errorf("%s takes no name", flags.Arg(0))
	}
	if command.argument != "" && flags.NArg() != 2 {
		return fmt.Errorf("%s takes the name of one %s\n\n%s", flags.Arg(0), command.argument, usage)
	}
	config := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	namespace, _, err := config.Namespace()
	if err != nil {
		return err
	}
	c, err := connect(config)
	if err != nil {
		return err
	}
	return command.run(plugin{c, namespace, out, errs}, ctx, flags.Arg(1), a)
}

// scheme has what the plugin reads and writes.
func scheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	return s, errors.Join(api.AddTo(s), corev1.AddToScheme(s))
}

func connect(config clientcmd.ClientConfig) (client.Client, error) {
	known, err := scheme()
	if err != nil {
		return nil, err
	}
	rest, err := config.ClientConfig()
	if err != nil {
		return nil, err
	}
	return client.New(rest, client.Options{Scheme: known})
}
