// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/internal/cli/encryption"
)

// dumpDirEnv names the directory for dumps in place of capture.DefaultDir.
const dumpDirEnv = "GPUCKPT_IMAGE_PATH"

// checkpointAnswer is what checkpoint prints as JSON of a container, cut of several. Of a push there is
// what it did, or why it failed.
type checkpointAnswer struct {
	*capture.Result
	// Different is what a restore does not bring back as it is.
	Different []string        `json:"different,omitempty"`
	Push      *transferAnswer `json:"push,omitempty"`
	PushError string          `json:"pushError,omitempty"`
}

type cut struct {
	Containers []checkpointAnswer `json:"containers"`
}

func checkpointCommand() *cobra.Command {
	var d daemon
	var b buildFlags
	var o capture.Options
	var pod, inMemory string
	var p pushed
	c := &cobra.Command{
		Use:   "checkpoint CONTAINER... | --pod POD [CONTAINER...] --image REF",
		Short: "Make a checkpoint image of a running container",
		Long: `Make a checkpoint image of a running container.

The container is paused and dumped, in memory if that has room, and the image is built of the
dump in containerd. With --leave-running the container continues as soon as the dump is complete
and its GPU filled again. Otherwise it ends once the image is complete. If anything fails,
the container is as it was before, and there is no image.

Several containers, or all of a pod (--pod), are taken in one cut. None is dumped before all
are paused, and none continues before all are dumped. If one fails, all continue. The image of
each has "-" and the container's name behind its tag. With --pod, CONTAINER is a name in the
pod; one that is named alone has the tag as it is.

With --wait-for the checkpoint begins once a path is there in each container: a program makes
the file when it is ready to be taken.

With --push the image is sent to a registry as well, while it is made, as "gpuckpt image
push" does. If that fails, the image stays in containerd.`,
		Example: `  gpuckpt checkpoint job --image example.com/job:1 --leave-running
  gpuckpt checkpoint job --push registry.example.com/job:1
  gpuckpt checkpoint --namespace k8s.io --pod default/trainer --image registry.example.com/trainer:1`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 && pod == "" {
				return errors.New("name containers, or a pod with --pod")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) (err error) {
			if o.Build, err = b.options(); err != nil {
				return err
			}
			if err := p.check(); err != nil {
				return err
			}
			if o.InMemory, err = memoryFor(inMemory, cmd.Flags().Changed("image-path")); err != nil {
				return err
			}
			var notSent error // the answer has the images all the same
			err = d.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (any, string, error) {
				client, err := dial()
				if err != nil {
					return nil, "", err
				}
				o.Progress = progress
				targets := []capture.Target{{Image: p.image, Previous: b.previous}}
				switch {
				case pod != "":
					targets, err = capture.Pod(ctx, client, pod, args, p.image, b.previous, true)
				case len(args) == 1:
					targets[0].ID = args[0]
				default:
					targets = nil
					for _, id := range args {
						targets = append(targets, capture.NewTarget(id, id, p.image, b.previous))
					}
				}
				if err != nil {
					return nil, "", err
				}
				defer p.close()
				if err := p.begin(ctx, localstore.Content(ctx, client), &o, targets); err != nil {
					return nil, "", err
				}
				heard := hear(ctx, client, "/gpuckpt/checkpointed")
				defer heard.close()
				made, err := capture.Containers(ctx, client, targets, o)
				if err != nil {
					return nil, "", err
				}
				var words strings.Builder
				var answers []checkpointAnswer
				for _, m := range made {
					differs := heard.of(m.Container)
					words.WriteString(captured(m) + differentWords(differs))
					answers = append(answers, checkpointAnswer{Result: m, Different: differs})
				}
				notSent = p.push(ctx, dial, &o, answers, &words)
				if pod != "" || len(made) > 1 {
					return cut{answers}, words.String(), nil
				}
				return answers[0], words.String(), nil
			})
			return errors.Join(err, notSent)
		},
	}
	c.ValidArgsFunction = d.containers
	d.flags(c)
	b.flags(c, d.images)
	f := c.Flags()
	p.flags(c)
	f.StringVarP(&p.image, "image", "i", "", "name of the image, example.com/job:1 (default: that of --push)")
	f.StringVar(&pod, "pod", "", "all running containers of this pod of Kubernetes, NAME or NAMESPACE/NAME, or the named ones, in one cut")
	f.BoolVar(&o.LeaveRunning, "leave-running", false, "let the container run on, as soon as the dump is complete and its GPU filled again")
	f.StringVar(&o.WaitFor, "wait-for", "", "begin once this path is there in the container, /run/ready")
	f.StringVar(&o.Dir, "image-path", cmp.Or(os.Getenv(dumpDirEnv), capture.DefaultDir),
		"directory on this node in which the dump is made, in one of its own; a tmpfs is fastest ($"+dumpDirEnv+")")
	c.MarkFlagsOneRequired("image", "push")
	_ = c.RegisterFlagCompletionFunc("image", d.images)
	_ = c.MarkFlagDirname("image-path")
	f.StringVar(&inMemory, "in-memory", "", "most memory that the dump may take, 16GiB; 0 for none. The rest is dumped to the disk (default: three quarters of what is available, and none if --image-path is named)")
	return c
}

// memoryFor returns how much memory a dump may take, in bytes.
func memoryFor(text string, pathNamed bool) (uint64, error) {
	switch {
	case text == "" && pathNamed:
		return 0, nil
	case text == "":
		return math.MaxUint64, nil
	}
	n, err := units.RAMInBytes(text)
	if err != nil || n < 0 {
		return 0, fmt.Errorf("--in-memory: %q is not a size such as 16GiB", text)
	}
	return uint64(n), nil
}

// captured says what was made of a container.
func captured(made *capture.Result) string {
	state := "the container has ended"
	if made.Running {
		state = fmt.Sprintf("the container runs on, it was paused for %.2f s", made.PausedSeconds)
	}
	return fmt.Sprintf("%s@%s\n%s of GPU state; layers of %s, %s of it reused; %.2f s; %s\n",
		made.Image, made.Digest, size(made.GPUBytes), size(made.Bytes), size(made.Reused), made.SecondsOverall, state)
}

// pushed is where the images of a checkpoint are sent to.
type pushed struct {
	image      string // the name that was asked for, of one container, or what the others' begin with
	to         string // "" for nowhere
	recipients []string
	registry.Options
	ahead []*registry.Ahead // of each target; nil: nothing is sent before the images are complete
}

func (p *pushed) flags(c *cobra.Command) {
	c.Flags().StringVar(&p.to, "push", "", "send the image to a registry by this name, registry.example.com/job:1")
	registryFlags(c, &p.Options)
	encryptFlag(c, &p.recipients)
}

// check refuses what cannot be pushed, or for nobody, before anything is dumped.
func (p *pushed) check() error {
	switch {
	case p.to != "":
		p.image = cmp.Or(p.image, p.to)
		return cmp.Or(localstore.CheckName(p.to), encryption.Check(p.recipients))
	case len(p.recipients) > 0:
		return errors.New("--encrypt is for --push: an image in containerd is not encrypted")
	}
	return nil
}

// again is the command that sends an image which could not be sent.
func (p *pushed) again(ctx context.Context, image, to string) string {
	words := []string{"gpuckpt image push"}
	if namespace, _ := namespaces.Namespace(ctx); namespace != namespaces.Default {
		words = append(words, "--namespace", namespace)
	}
	for _, r := range p.recipients {
		words = append(words, "--encrypt", r)
	}
	return strings.Join(append(words, image, to), " ")
}

// begin has the layers of the images sent as they are made. Those that are to be encrypted are not: they are others.
func (p *pushed) begin(ctx context.Context, store content.Provider, o *capture.Options, targets []capture.Target) error {
	if p.to == "" || encryption.Encrypts(p.recipients) {
		return nil
	}
	for i, t := range targets {
		p.Progress = o.Progress
		if len(targets) > 1 && o.Progress != nil {
			p.Progress = func(s images.Step) {
				s.Name = t.ID + " " + s.Name
				o.Progress(s)
			}
		}
		ahead, err := registry.Begin(ctx, store, p.target(t.Image), p.Options)
		if err != nil {
			return err
		}
		p.ahead, targets[i].Made = append(p.ahead, ahead), ahead.Add
	}
	return nil
}

func (p *pushed) close() {
	for _, a := range p.ahead {
		a.Close()
	}
}

// target returns where an image is sent to: those of several containers have different ends.
func (p *pushed) target(image string) string {
	return p.to + strings.TrimPrefix(image, p.image)
}

// push sends the images that were made, and adds what it did to their answers. The error is of all that
// could not be sent.
func (p *pushed) push(ctx context.Context, dial convert.Dial, o *capture.Options, made []checkpointAnswer, words *strings.Builder) error {
	if p.to == "" {
		return nil
	}
	client, err := dial()
	if err != nil {
		return err
	}
	p.Progress = o.Progress
	var failed []error
	for i, m := range made {
		began, a := time.Now(), &transferAnswer{Image: p.target(m.Image)}
		if p.ahead != nil {
			p.Ahead = p.ahead[i]
		}
		if err := localstore.Outlast(ctx, client, func() error {
			return sendImage(ctx, dial, convert.InContainerd+":"+m.Image, a, p.recipients, p.Options)
		}); err != nil {
			made[i].PushError = interrupted(ctx, err.Error())
			failed = append(failed, fmt.Errorf("%w\n%s is in containerd: `%s` sends it", err, m.Image, p.again(ctx, m.Image, a.Image)))
			continue
		}
		a.Seconds = time.Since(began).Seconds()
		made[i].Push = a
		words.WriteString(a.words("sent"))
	}
	return errors.Join(failed...)
}
