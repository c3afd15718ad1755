// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package tell

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	apievents "github.com/containerd/containerd/api/events"
	"github.com/containerd/containerd/api/services/containers/v1"
	"github.com/containerd/containerd/api/services/events/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apitypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
)

// daemon is a containerd that has one container of a pod, one of nobody's, and events.
type daemon struct {
	events.UnimplementedEventsServer
	containers.UnimplementedContainersServer
	says    chan *types.Envelope
	filters chan []string
}

func (d *daemon) Subscribe(r *events.SubscribeRequest, to events.Events_SubscribeServer) error {
	d.filters <- r.Filters
	for {
		select {
		case e, ok := <-d.says:
			if !ok {
				return errors.New("containerd ends")
			}
			if err := to.Send(e); err != nil {
				return err
			}
		case <-to.Context().Done():
			return to.Context().Err()
		}
	}
}

func (d *daemon) Get(ctx context.Context, r *containers.GetContainerRequest) (*containers.GetContainerResponse, error) {
	asked, _ := metadata.FromIncomingContext(ctx)
	if in := asked.Get("containerd-namespace"); len(in) != 1 || in[0] != "k8s.io" {
		return nil, status.Errorf(codes.InvalidArgument, "in the namespace %v", in)
	}
	switch r.ID {
	case "pods":
		return &containers.GetContainerResponse{Container: &containers.Container{ID: r.ID, Labels: map[string]string{
			"io.kubernetes.pod.name": "job", "io.kubernetes.pod.namespace": "ns", "io.kubernetes.pod.uid": "1-2", "io.kubernetes.container.name": "main",
		}}}, nil
	case "nobodys":
		return &containers.GetContainerResponse{Container: &containers.Container{ID: r.ID}}, nil
	}
	return nil, status.Error(codes.NotFound, "there is none")
}

// serve has the daemon listen at a socket, until the end of the test or stop.
func (d *daemon) serve(t *testing.T, socket string) (stop func()) {
	t.Helper()
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	events.RegisterEventsServer(server, d)
	containers.RegisterContainersServer(server, d)
	ended := make(chan struct{})
	go func() { defer close(ended); _ = server.Serve(listener) }()
	stop = func() { server.Stop(); <-ended }
	t.Cleanup(stop)
	return stop
}

func said(t *testing.T, topic, id string, labels map[string]string) *types.Envelope {
	t.Helper()
	value, err := proto.Marshal(&apievents.ContainerUpdate{ID: id, Labels: labels})
	if err != nil {
		t.Fatal(err)
	}
	return &types.Envelope{Namespace: "k8s.io", Topic: topic, Event: &anypb.Any{TypeUrl: "containerd.events.ContainerUpdate", Value: value}}
}

// What shims say of containers of pods becomes events of the pods, also after containerd was
// restarted. The socket is a link, as in the node's root.
func TestTell(t *testing.T) {
	root := t.TempDir()
	if err := errors.Join(os.MkdirAll(filepath.Join(root, "run"), 0o700), os.MkdirAll(filepath.Join(root, "var"), 0o700), os.Symlink("/run/c.sock", filepath.Join(root, "var", "link.sock"))); err != nil {
		t.Fatal(err)
	}
	d := &daemon{says: make(chan *types.Envelope), filters: make(chan []string, 10)}
	stop := d.serve(t, filepath.Join(root, "run", "c.sock"))
	recorder := record.NewFakeRecorder(100)
	recorder.IncludeObject = true
	pods := fake.NewClientBuilder().WithObjects(probed("1-2", corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{}})).Build()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() {
		ended <- (&Teller{Root: root, Socket: "/var/link.sock", Events: recorder, Pods: pods}).Start(ctx)
	}()
	await := func(what string, of <-chan string) string {
		t.Helper()
		select {
		case e := <-of:
			return e
		case <-time.After(time.Minute):
			t.Fatalf("no %s", what)
			return ""
		}
	}
	subscribed := func() {
		t.Helper()
		select {
		case filters := <-d.filters:
			if len(filters) != 1 || filters[0] != `namespace=="k8s.io",topic~="^/gpuckpt/"` {
				t.Fatalf("it asks for %q", filters)
			}
		case <-time.After(time.Minute):
			t.Fatal("it does not listen")
		}
	}
	subscribed()
	for _, c := range []struct {
		topic  string
		labels map[string]string
		want   string
	}{
		{"checkpointed", map[string]string{"took": "1.3s", "bytes": "123"}, "Normal Checkpointed container main, in 1.3s, 123 bytes"},
		{"restored", map[string]string{"took": "2s"}, "Normal Restored container main, in 2s"},
		{"suspended", map[string]string{"took": "2s"}, "Normal Suspended container main, in 2s"},
		{"resumed", map[string]string{"took": "2s"}, "Normal Resumed container main, in 2s"},
		{"checkpoint-failed", map[string]string{"took": "2s", "error": "no room"}, "Warning CheckpointFailed container main: no room"},
		{"restore-failed", map[string]string{"took": "2s", "error": "no GPU\x1b[2J"}, "Warning RestoreFailed container main: no GPU\uFFFD[2J"},
		{"suspend-failed", map[string]string{"error": "x"}, "Warning SuspendFailed container main: x"},
		{"resume-failed", map[string]string{"error": "x"}, "Warning ResumeFailed container main: x"},
	} {
		for _, id := range []string{"nobodys", "gone", "pods"} { // the first two are of no pod
			d.says <- said(t, "/gpuckpt/"+c.topic, id, c.labels)
		}
		if got := await("event of "+c.topic, recorder.Events); !strings.HasPrefix(got, c.want) || !strings.Contains(got, "Pod") {
			t.Errorf("%s: %s, want %s", c.topic, got, c.want)
		}
		if c.topic != "suspended" {
			continue
		}
		if got := await("warning", recorder.Events); !strings.HasPrefix(got, "Warning LivenessProbe container main is suspended and answers no probe: after about 30s ") {
			t.Error(got)
		}
	}
	d.says <- said(t, "/gpuckpt/unheard-of", "pods", nil)
	d.says <- &types.Envelope{Topic: "/gpuckpt/restored", Event: &anypb.Any{Value: []byte{0xff}}}
	stop()
	d.serve(t, filepath.Join(root, "run", "c.sock"))
	subscribed()
	d.says <- said(t, "/gpuckpt/resumed", "pods", map[string]string{"took": "3s"})
	if got := await("event after a restart", recorder.Events); !strings.HasPrefix(got, "Normal Resumed container main, in 3s") {
		t.Errorf("after a restart: %s", got)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// probed is the pod of the daemon's container, with a liveness probe.
func probed(uid apitypes.UID, probe corev1.ProbeHandler) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "job", UID: uid},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", LivenessProbe: &corev1.Probe{ProbeHandler: probe, FailureThreshold: 3, PeriodSeconds: 10}}}},
	}
}

// Nobody is warned of a liveness probe that is an exec, of none, or of the probe of another pod.
func TestNoWarning(t *testing.T) {
	unprobed := probed("1-2", corev1.ProbeHandler{})
	unprobed.Spec.Containers[0].LivenessProbe = nil
	for name, pod := range map[string]*corev1.Pod{
		"an exec": probed("1-2", corev1.ProbeHandler{Exec: &corev1.ExecAction{}}),
		"none":    unprobed,
		"another": probed("3-4", corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{}}),
	} {
		recorder := record.NewFakeRecorder(10)
		teller := &Teller{Events: recorder, Pods: fake.NewClientBuilder().WithObjects(pod).Build()}
		teller.warn(t.Context(), &corev1.ObjectReference{Namespace: "ns", Name: "job", UID: "1-2"}, "main")
		if len(recorder.Events) > 0 {
			t.Errorf("%s: %s", name, <-recorder.Events)
		}
	}
}
