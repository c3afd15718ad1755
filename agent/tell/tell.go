// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package tell tells a cluster what the shims of a node do: each checkpoint, restore, suspend and
// resume of a pod's container becomes an event of the pod, whoever asked for it.
//
// The shims publish events in the node's containerd (docs/operate.md); containerd keeps none. So what
// happens while nobody listens, such as during a restart of containerd, is told nowhere.
package tell

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/services/containers/v1"
	"github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	securejoin "github.com/cyphar/filepath-securejoin"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
	corev1 "k8s.io/api/core/v1"
	apitypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

const (
	// namespace is containerd's for Kubernetes.
	namespace = "k8s.io"
	// prefix is that of the topics (runtime/internal/event).
	prefix = "/gpuckpt/"
	// again is how long after a lost connection the next is tried.
	again = 3 * time.Second
)

// reasons are the events of pods, by what is behind the prefix of a topic.
var reasons = map[string]string{
	"checkpointed": api.ContainerCheckpointed, "restored": api.ContainerRestored, "suspended": api.Suspended, "resumed": api.Resumed, "started-afresh": api.StartedAfresh,
	"checkpoint-failed": api.CheckpointFailed, "restore-failed": api.RestoreFailed, "suspend-failed": api.SuspendFailed, "resume-failed": api.ResumeFailed,
}

// Teller makes events of pods out of what the shims of a node say.
type Teller struct {
	// Root is where the node's root is mounted, Socket that of containerd, as the node sees it.
	Root, Socket string
	Events       record.EventRecorder
	// Pods has the pods as the API server has them.
	Pods client.Reader
	// Checkpointed is told of each container that is checkpointed, by its pod; nil: nobody is.
	Checkpointed func(ctx context.Context, pod apitypes.UID, bytes int64)
}

// Start listens until ctx ends. A containerd that does not answer is asked again and again.
func (t *Teller) Start(ctx context.Context) error {
	wait.UntilWithContext(ctx, func(ctx context.Context) {
		if err := t.listen(ctx); err != nil && ctx.Err() == nil {
			klog.FromContext(ctx).Info("no events of the node's shims for a moment", "error", err)
		}
	}, again)
	return nil
}

// listen makes events until the connection to containerd is lost, which is its error.
func (t *Teller) listen(ctx context.Context) error {
	socket, err := securejoin.SecureJoin(t.Root, t.Socket) // a link is of the node's root
	if err != nil {
		return err
	}
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to containerd: %w", err)
	}
	defer connection.Close()
	ctx = metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
	stream, err := events.NewEventsClient(connection).Subscribe(ctx, &events.SubscribeRequest{
		Filters: []string{fmt.Sprintf("namespace==%q,topic~=%q", namespace, "^"+prefix)},
	})
	if err != nil {
		return fmt.Errorf("listen to containerd: %w", err)
	}
	all := containers.NewContainersClient(connection)
	for {
		e, err := stream.Recv()
		if err != nil {
			return fmt.Errorf("listen to containerd: %w", err)
		}
		t.tell(ctx, all, e)
	}
}

// tell makes an event of the pod of what a shim says. What is of no pod is left out.
func (t *Teller) tell(ctx context.Context, all containers.ContainersClient, e *types.Envelope) {
	reason := reasons[strings.TrimPrefix(e.Topic, prefix)]
	var said apievents.ContainerUpdate
	if reason == "" || e.Event == nil || proto.Unmarshal(e.Event.Value, &said) != nil {
		return
	}
	answer, err := all.Get(ctx, &containers.GetContainerRequest{ID: said.ID})
	if err != nil {
		klog.FromContext(ctx).Info("an event of a container that is not there", "topic", e.Topic, "container", said.ID, "error", err)
		return
	}
	labels := answer.Container.Labels
	name := labels["io.kubernetes.container.name"]
	pod := &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: labels["io.kubernetes.pod.namespace"], Name: labels["io.kubernetes.pod.name"],
		UID: apitypes.UID(labels["io.kubernetes.pod.uid"]), FieldPath: "spec.containers{" + name + "}",
	}
	if pod.Name == "" || name == "" {
		return
	}
	kind, message := corev1.EventTypeNormal, fmt.Sprintf("container %s, in %s", name, said.Labels["took"])
	bytes, err := strconv.ParseInt(said.Labels["bytes"], 10, 64)
	if err == nil {
		message += fmt.Sprintf(", %d bytes", bytes)
	}
	if reason == api.ContainerCheckpointed && t.Checkpointed != nil {
		t.Checkpointed(ctx, pod.UID, bytes)
	}
	if why := said.Labels["error"]; why != "" {
		kind, message = corev1.EventTypeWarning, fmt.Sprintf("container %s: %s", name, why)
	}
	t.Events.Event(pod, kind, reason, api.Text(message))
	if reason == api.Suspended {
		t.warn(ctx, pod, name)
	}
}

// warn says of a container that was suspended how long its kubelet lets it be. Nobody else can: neither
// containerd nor the shim hears of probes.
func (t *Teller) warn(ctx context.Context, of *corev1.ObjectReference, container string) {
	var pod corev1.Pod
	if err := t.Pods.Get(ctx, client.ObjectKey{Namespace: of.Namespace, Name: of.Name}, &pod); err != nil || pod.UID != of.UID {
		return // it ends
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) { // sidecars are among the first
		p := c.LivenessProbe
		if c.Name != container || p == nil || p.Exec != nil { // the kubelet ignores an exec that is refused
			continue
		}
		left := time.Duration(max(p.FailureThreshold, 1)*max(p.PeriodSeconds, 1)) * time.Second
		t.Events.Event(of, corev1.EventTypeWarning, api.LivenessProbe, fmt.Sprintf("container %s is suspended and answers no probe: "+
			"after about %s without an answer the kubelet restarts it, and its work is lost. Resume it before, and give its liveness probe an exec, which the kubelet lets fail meanwhile", container, left))
	}
}
