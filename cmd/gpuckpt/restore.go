// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	cdispec "github.com/containerd/containerd/v2/pkg/cdi"
	"github.com/containerd/containerd/v2/pkg/cio"
	ctroci "github.com/containerd/containerd/v2/pkg/oci"
	"github.com/containerd/errdefs"
	"github.com/docker/go-units"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/spf13/cobra"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/pkg/parser"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/arriving"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/localstore"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/images/registry"
	"github.com/gpuckpt/gpuckpt/internal/cli/encryption"
	"github.com/gpuckpt/gpuckpt/internal/node/bundle"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

const (
	// runtimeName is this project's runtime, as clients call it.
	runtimeName = "io.containerd.gpuckpt.v2"
	// gpuKind is the CDI kind of NVIDIA's GPUs, for --gpus.
	gpuKind = "nvidia.com/gpu"
)

type restoreOptions struct {
	daemon
	name, base, runtime, snapshotter, log string
	gpus                                  []int
	cdiDirs                               []string
	devices, mounts, annotations          []string
	labels, capAdd, capDrop               []string
	user, memory, files                   string
	netHost, cni, pull                    bool
	privileged, newPrivs, readOnly, tty   bool
	registry                              registry.Options
	heard                                 *differences // nil before it starts, and with other runtimes
}

type restoreAnswer struct {
	Container string  `json:"container"`
	PID       uint32  `json:"pid"`
	Seconds   float64 `json:"seconds"`
	// Different is what is not as it was.
	Different []string `json:"different,omitempty"`
}

func restoreCommand() *cobra.Command {
	var o restoreOptions
	c := &cobra.Command{
		Use:   "restore REF|DIR",
		Short: "Restore a checkpoint in a new container",
		Long: `Restore a checkpoint in a new container.

REF is a checkpoint image in containerd. The container is made as "ctr run" makes it,
with this project's runtime and the annotation ` + annotations.Restore + `=true, and its
processes continue where they were. DIR is a dump ("ctr tasks checkpoint --image-path
DIR"), which has no files of the container: they come from the image --base.

With --pull, an image that containerd lacks comes from its registry. The restore begins
when its layers are there, and memory and GPU state stream in behind. Then containerd has the image.

Name again what the container had from outside, with the words of "ctr run": GPUs, mounts, the host's
network, capabilities, a user, a terminal. A mount takes the place of the default one at its path.`,
		Example: `  gpuckpt restore example.com/job:1 --name job --gpus 0
  gpuckpt restore --pull registry.example.com/job:1 --name job --gpus 0,1 --net-host
  gpuckpt restore ./dump --base example.com/base:1 --name job`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return o.run(cmd, func(ctx context.Context, dial convert.Dial, progress images.Progress) (any, string, error) {
				began := time.Now()
				o.registry.Progress = progress
				defer func() { o.heard.close() }()
				task, err := o.restore(ctx, dial, args[0])
				if err != nil {
					return nil, "", err
				}
				seconds := time.Since(began).Seconds()
				return restoreAnswer{Container: o.name, PID: task.Pid(), Seconds: seconds, Different: o.heard.of(o.name)}, o.name + "\n", nil
			})
		},
	}
	c.ValidArgsFunction = first(o.images)
	o.flags(c)
	f := c.Flags()
	f.StringVar(&o.name, "name", "", "name of the container (default: made of the image's name)")
	f.IntSliceVar(&o.gpus, "gpus", nil, "indices of the GPUs that the container gets, through CDI")
	f.StringSliceVar(&o.devices, "device", nil, "CDI devices that the container gets, "+gpuKind+"=0")
	f.StringSliceVar(&o.cdiDirs, "cdi-spec-dirs", cdi.DefaultSpecDirs, "directories of CDI specifications")
	f.StringArrayVar(&o.mounts, "mount", nil, "type=bind,src=PATH,dst=PATH,options=rbind:ro, a mount; once for each")
	f.StringArrayVar(&o.annotations, "annotation", nil, "NAME=VALUE, a further annotation; once for each")
	f.BoolVar(&o.pull, "pull", false, "restore an image that containerd lacks while it comes from its registry")
	registryFlags(c, &o.registry)
	f.BoolVar(&o.netHost, "net-host", false, "the host's network, for a container that had it")
	f.BoolVar(&o.cni, "cni", false, "a network by the node's CNI configuration, for a container that had one")
	c.MarkFlagsMutuallyExclusive("cni", "net-host")
	f.StringArrayVar(&o.labels, "label", nil, "NAME=VALUE, a label of the container; once for each")
	f.StringSliceVar(&o.capAdd, "cap-add", nil, "capabilities that the container gets, CAP_SYS_ADMIN")
	f.StringSliceVar(&o.capDrop, "cap-drop", nil, "capabilities that it does not get")
	f.BoolVar(&o.privileged, "privileged", false, "all capabilities and all devices of the host")
	f.BoolVar(&o.newPrivs, "allow-new-privs", false, "let its programs gain privileges, such as by sudo, as Docker's and nerdctl's containers may")
	f.BoolVar(&o.readOnly, "read-only", false, "a root file system that is read-only")
	f.StringVar(&o.user, "user", "", "USER[:GROUP] that the container was run as (default: the image's)")
	f.StringVar(&o.memory, "memory-limit", "", "memory that the container may take, 16GiB (default: all)")
	f.StringVar(&o.files, "rlimit-nofile", "", "SOFT[:HARD], how many files a program may have open (default: 1024)")
	f.BoolVarP(&o.tty, "tty", "t", false, "a terminal, for a container that had one")
	f.StringVar(&o.base, "base", "", "for a DIR: the image that the container was made from")
	f.StringVar(&o.runtime, "runtime", runtimeName, "containerd runtime, or the path of its shim")
	f.StringVar(&o.snapshotter, "snapshotter", "", "containerd snapshotter (default: that of containerd's namespace)")
	f.StringVar(&o.log, "log-file", "", "file for the container's output (default: none)")
	_ = c.RegisterFlagCompletionFunc("base", o.images)
	_ = c.MarkFlagFilename("log-file")
	_ = c.MarkFlagDirname("cdi-spec-dirs")
	return c
}

func (o *restoreOptions) restore(ctx context.Context, dial convert.Dial, from string) (_ client.Task, err error) {
	if o.runtime != runtimeName && filepath.Base(o.runtime) != proc.ShimName {
		return nil, fmt.Errorf("--runtime %s would start the program from the beginning: it must be %s, or a path of %s", o.runtime, runtimeName, proc.ShimName)
	}
	c, err := dial()
	if err != nil {
		return nil, err
	}
	ref, dir := from, ""
	if convert.IsPath(from) {
		if dir, err = filepath.Abs(from); err != nil {
			return nil, err
		}
		if _, err := os.Stat(filepath.Join(dir, "inventory.img")); err != nil { // the shim parses it, when it has seen the signature
			return nil, fmt.Errorf("restore %s: it is not a checkpoint: %w", from, err)
		}
		if ref = o.base; ref == "" {
			return nil, fmt.Errorf("restore %s: a dump has no files of the container: name the image it was made from with --base", from)
		}
	} else if o.base != "" {
		return nil, errors.New("--base is for restoring from a directory; a checkpoint image has its own")
	}
	if o.name == "" {
		o.name = newName(ref)
	}
	if o.snapshotter, err = o.daemon.snapshotter(ctx, c, o.snapshotter); err != nil {
		return nil, err
	}
	if _, err := c.ContainerService().Get(ctx, o.name); err == nil { // before anything is fetched
		return nil, o.explain(from, o.taken(errdefs.ErrAlreadyExists))
	}
	found, err := localstore.Find(ctx, c, ref)
	if o.pull && dir == "" && errdefs.IsNotFound(err) {
		task, aerr := o.pulled(ctx, c, ref)
		if !errors.Is(aerr, arriving.ErrHere) {
			return task, o.explain(from, aerr)
		}
		found, err = localstore.Find(ctx, c, ref)
	}
	if err != nil {
		return nil, fmt.Errorf("restore %s (`gpuckpt image pull` fetches an image, --pull restores it meanwhile): %w", from, err)
	}
	image := client.NewImage(c, found)
	if dir == "" {
		// Nothing but the manifest and the config: the shim parses the rest, when it has seen the signature.
		if _, err := oci.Outline(ctx, c.ContentStore(), found.Target); err != nil {
			return nil, fmt.Errorf("restore %s: %w", from, err)
		}
	}
	task, err := o.start(ctx, c, image, dir)
	return task, o.explain(from, err)
}

// explain says what can be done about a restore that failed.
func (o *restoreOptions) explain(from string, err error) error {
	switch {
	case err == nil:
		return nil
	case len(o.gpus)+len(o.devices) == 0 && strings.Contains(err.Error(), "GPU"):
		return fmt.Errorf("restore %s: %w\nif the checkpoint has GPUs, name as many with --gpus or --device", from, err)
	case strings.Contains(err.Error(), "unresolvable CDI devices"):
		return fmt.Errorf("restore %s: %w\n%s have no such device: `gpuckpt cdi generate` writes a specification, --cdi-spec-dirs names other directories", from, err, strings.Join(o.cdiDirs, ", "))
	}
	return fmt.Errorf("restore %s: %w", from, err)
}

// pulled restores an image that comes from its registry, meanwhile if that can be.
func (o *restoreOptions) pulled(ctx context.Context, c *client.Client, ref string) (client.Task, error) {
	from, err := registry.Open(ctx, ref, "pull", o.registry)
	if err != nil {
		return nil, fmt.Errorf("pull %s: %w", ref, err)
	}
	task, err := o.arriving(ctx, c, from)
	if !errors.Is(err, arriving.ErrWhole) || ctx.Err() != nil {
		return task, err
	}
	image, _, err := encryption.Pull(ctx, c, ref, o.snapshotter, nil, o.registry)
	if err != nil {
		return nil, err
	}
	return o.start(ctx, c, image, "")
}

// arriving restores an image while it is fetched.
func (o *restoreOptions) arriving(ctx context.Context, c *client.Client, from *registry.Source) (_ client.Task, err error) {
	i, err := encryption.Arrive(ctx, c, from, o.snapshotter)
	if err != nil {
		return nil, err
	}
	task, err := o.start(ctx, c, i, "")
	if err != nil {
		err = errors.Join(err, i.Close())
		if wrong := i.Wrong(); wrong != nil {
			from.Note(fmt.Sprintf("trying again: %v", wrong))
			err = fmt.Errorf("%w: %w", arriving.ErrWhole, err)
		}
		return nil, err
	}
	defer func() { err = errors.Join(err, i.Close()) }()
	if err := i.Finish(); err != nil { //nolint:contextcheck // Begin got it
		return nil, fmt.Errorf("the container runs, but its image is not kept: %w", err)
	}
	return task, nil
}

func (o *restoreOptions) taken(err error) error {
	return fmt.Errorf("the name %s is in use; choose another with --name: %w", o.name, err)
}

func newName(ref string) string {
	name, _, _ := strings.Cut(path.Base(ref), "@")
	name, _, _ = strings.Cut(name, ":")
	return name + "-" + strings.ToLower(rand.Text()[:8])
}

// start makes the container and starts it. On an error there is none.
func (o *restoreOptions) start(ctx context.Context, c *client.Client, image client.Image, dir string) (_ client.Task, err error) {
	if err := localstore.Unpack(ctx, c, image, o.snapshotter, nil); err != nil {
		return nil, err
	}
	spec, err := o.spec(image, o.base == "")
	if err != nil {
		return nil, err
	}
	labels, err := pairs("label", o.labels)
	if err != nil {
		return nil, err
	}
	// The way back goes on when the command was interrupted.
	back := context.WithoutCancel(ctx)
	container, err := c.NewContainer(ctx, o.name,
		client.WithImage(image),
		client.WithImageConfigLabels(image),
		withoutNerdctl,
		client.WithAdditionalContainerLabels(labels),
		client.WithSnapshotter(o.snapshotter),
		client.WithNewSnapshot(o.name, image),
		client.WithImageStopSignal(image, "SIGTERM"),
		client.WithRuntime(o.runtime, nil),
		client.WithNewSpec(spec...))
	if err != nil {
		if errdefs.IsAlreadyExists(err) {
			return nil, o.taken(err)
		}
		_ = c.SnapshotService(o.snapshotter).Remove(back, o.name) // there may be none
		return nil, fmt.Errorf("make the container %s: %w", o.name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, removeGivenUp(back, container))
		}
	}()
	// By the shim's pipes even to nowhere: CRIU cannot dump a process with a file of the host open.
	file, err := filepath.Abs(cmp.Or(o.log, os.DevNull))
	if err != nil {
		return nil, err
	}
	output := cio.LogURI(&url.URL{Scheme: "file", Path: file})
	if o.tty { // the shim copies a terminal's output to a FIFO, or a file, that is there
		f, err := os.Create(file)
		if err == nil {
			err = f.Close()
		}
		if err != nil {
			return nil, err
		}
		output = cio.TerminalLogURI(&url.URL{Opaque: file})
	}
	if o.runtime == runtimeName {
		o.heard.close() // of an earlier attempt
		o.heard = hear(ctx, c, "/gpuckpt/restored")
	}
	task, err := container.NewTask(ctx, output, func(_ context.Context, _ *client.Client, info *client.TaskInfo) error {
		if dir != "" {
			info.Options = &options.Options{CriuImagePath: dir}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return task, task.Start(ctx)
}

// withoutNerdctl removes labels of an image's that nerdctl would take for its own: `nerdctl rm` removes the
// directory that one of them names. The client's library leaves out containerd's.
func withoutNerdctl(_ context.Context, _ *client.Client, c *containers.Container) error {
	maps.DeleteFunc(c.Labels, func(name, _ string) bool { return strings.HasPrefix(name, "nerdctl/") })
	return nil
}

// removeGivenUp removes a container whose start has failed or was given up. containerd may have made the task
// of a client that no longer waited for it, or be about to take it back: such a task is deleted first.
func removeGivenUp(ctx context.Context, container client.Container) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		err := container.Delete(ctx, client.WithSnapshotCleanup)
		if !errdefs.IsFailedPrecondition(err) {
			return err
		}
		task, terr := container.Task(ctx, nil)
		if terr == nil {
			_, terr = task.Delete(ctx) // one that was not started
		}
		if errdefs.IsFailedPrecondition(terr) {
			_, terr = task.Delete(ctx, client.WithProcessKill)
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, terr)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// sharedRoot has what is mounted be shared with the host, as clients do for a mount that is to be: else runc cuts that off.
func sharedRoot(_ context.Context, _ ctroci.Client, _ *containers.Container, s *ctroci.Spec) error {
	s.Linux.RootfsPropagation = "shared"
	return nil
}

// spec is the container's, made as "ctr run" makes it.
func (o *restoreOptions) spec(image client.Image, annotate bool) ([]ctroci.SpecOpts, error) {
	opts := []ctroci.SpecOpts{ctroci.WithDefaultUnixDevices, ctroci.WithImageConfig(image)}
	for _, m := range o.mounts {
		mount, err := bundle.ParseMount(m)
		if err != nil {
			return nil, err
		}
		opts = append(opts, ctroci.WithoutMounts(mount.Destination), ctroci.WithMounts([]specs.Mount{mount}))
		if slices.Contains(mount.Options, "rshared") || slices.Contains(mount.Options, "shared") {
			opts = append(opts, sharedRoot)
		}
	}
	granted, err := o.grants()
	if err != nil {
		return nil, err
	}
	opts = append(opts, granted...)
	if o.netHost {
		name, err := os.Hostname()
		if err != nil {
			return nil, err
		}
		opts = append(opts, ctroci.WithHostNamespace(specs.NetworkNamespace), ctroci.WithHostHostsFile, ctroci.WithHostResolvconf, ctroci.WithEnv([]string{"HOSTNAME=" + name}))
	}
	if o.cni {
		opts = append(opts, withCNI(o.namespace))
	}
	given, err := pairs("annotation", o.annotations)
	if err != nil {
		return nil, err
	}
	if _, set := given[annotations.Restore]; annotate && !set {
		given[annotations.Restore] = "true"
	}
	opts = append(opts, ctroci.WithAnnotations(given))
	devices := slices.Clone(o.devices)
	for _, d := range devices {
		if !parser.IsQualifiedName(d) {
			return nil, fmt.Errorf("--device %q is not a CDI device such as %s=0", d, gpuKind)
		}
	}
	for _, index := range o.gpus {
		devices = append(devices, fmt.Sprintf("%s=%d", gpuKind, index))
	}
	if err := cdi.Configure(cdi.WithSpecDirs(o.cdiDirs...), cdi.WithAutoRefresh(false)); err != nil {
		return nil, fmt.Errorf("read the CDI specifications in %s: %w", strings.Join(o.cdiDirs, ", "), err)
	}
	return append(opts, cdispec.WithCDIDevices(devices...)), nil
}

// grants is what else the container may do, or is, in the order of "ctr run".
func (o *restoreOptions) grants() (opts []ctroci.SpecOpts, _ error) {
	if o.tty {
		opts = append(opts, ctroci.WithTTY)
	}
	if o.user != "" {
		opts = append(opts, ctroci.WithUser(o.user), ctroci.WithAdditionalGIDs(o.user))
	}
	if o.privileged {
		opts = append(opts, ctroci.WithPrivileged, ctroci.WithAllDevicesAllowed, ctroci.WithHostDevices)
	}
	if o.newPrivs {
		opts = append(opts, ctroci.WithNewPrivileges)
	}
	for _, name := range slices.Concat(o.capAdd, o.capDrop) {
		if !strings.HasPrefix(name, "CAP_") { // which runc would leave out
			return nil, fmt.Errorf("%q is no capability such as CAP_SYS_ADMIN", name)
		}
	}
	opts = append(opts, ctroci.WithAddedCapabilities(o.capAdd), ctroci.WithDroppedCapabilities(o.capDrop))
	if o.readOnly {
		opts = append(opts, ctroci.WithRootFSReadonly())
	}
	if o.memory != "" {
		limit, err := units.RAMInBytes(o.memory)
		if err != nil || limit <= 0 {
			return nil, fmt.Errorf("--memory-limit %q is no size such as 16GiB", o.memory)
		}
		opts = append(opts, ctroci.WithMemoryLimit(uint64(limit)))
	}
	if o.files != "" {
		limit, err := units.ParseUlimit("nofile=" + o.files)
		if err != nil {
			return nil, fmt.Errorf("--rlimit-nofile %q is not SOFT or SOFT:HARD, such as 1024:4096", o.files)
		}
		opts = append(opts, ctroci.WithRlimit(&specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Soft: uint64(limit.Soft), Hard: uint64(limit.Hard)}))
	}
	return opts, nil
}

// pairs reads what a flag was given, NAME=VALUE each.
func pairs(flag string, given []string) (map[string]string, error) {
	all := make(map[string]string)
	for _, text := range given {
		name, value, ok := strings.Cut(text, "=")
		if !ok || name == "" {
			return nil, fmt.Errorf("--%s %q is not NAME=VALUE", flag, text)
		}
		all[name] = value
	}
	return all, nil
}
