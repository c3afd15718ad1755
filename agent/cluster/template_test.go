// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	toolscache "k8s.io/client-go/tools/cache"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllertest"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// made is a pod of a template with the gate, as its owner makes it.
func made(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "ns", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"pod-template-hash": "abc"},
			Annotations:     map[string]string{api.Repository: "r.test/team/server", api.PushSecret: "s"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "server-abc", UID: "rs", Controller: new(true)}},
		},
		Spec: corev1.PodSpec{
			SchedulingGates: []corev1.PodSchedulingGate{{Name: "another"}, {Name: api.Gate}},
			InitContainers:  []corev1.Container{{Name: "init", Image: "init:1"}},
			Containers:      []corev1.Container{{Name: "main", Image: "app:1", VolumeMounts: []corev1.VolumeMount{{Name: "data"}, {Name: "kube-api-access-" + name}}}},
		},
	}
}

// look has the namespace reconciled, more often than there is a reason to.
func (k *test) look() {
	k.Helper()
	for range 3 {
		k.reconcile(&templates{cluster: k.cluster}, "")
	}
}

// comes makes a pod, has it looked at, and returns it.
func (k *test) comes(pod *corev1.Pod) *corev1.Pod {
	k.Helper()
	k.must(k.client.Create(k.Context(), pod))
	k.look()
	var now corev1.Pod
	k.get(pod.Name, &now)
	return &now
}

// ready has a pod run on a node, and be ready.
func (k *test) ready(pod *corev1.Pod) {
	k.Helper()
	pod.Spec.NodeName = "here"
	k.must(k.client.Update(k.Context(), pod))
	pod.Status.Phase, pod.Status.Conditions = corev1.PodRunning, []corev1.PodCondition{{Type: corev1.ContainersReady, Status: corev1.ConditionTrue}}
	k.must(k.client.Status().Update(k.Context(), pod))
	k.look()
}

// taken returns the one Checkpoint, as the controller has given it to a node.
func (k *test) taken() *api.Checkpoint {
	k.Helper()
	var all api.CheckpointList
	k.must(k.client.List(k.Context(), &all))
	if len(all.Items) != 1 {
		k.Fatalf("%d Checkpoints", len(all.Items))
	}
	c := &all.Items[0]
	if c.Status.Node == "" {
		if why, err := (&attendance{cluster: k.cluster}).assign(k.Context(), c); why != nil || err != nil {
			k.Fatal(why, err)
		}
	}
	return c
}

// succeeds ends a Checkpoint.
func (k *test) succeeds(c *api.Checkpoint) {
	k.Helper()
	c.Status.Phase = api.Succeeded
	c.Status.Containers = []api.Container{{Name: "main", Image: c.Spec.Repository + ":" + c.Name, Digest: "sha256:1"}}
	k.must(k.client.Status().Update(k.Context(), c))
}

// says returns the next event.
func (k *test) says() string {
	k.Helper()
	select {
	case e := <-k.events.Events:
		return e
	default:
		return ""
	}
}

const continues, startsCold = "main=r.test/team/server:%s@sha256:1 init=init:1 restore=prefer", "main=app:1 init=init:1 restore="

// state is what a pod starts from.
func state(pod *corev1.Pod) string {
	if slices.Contains(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: api.Gate}) || !slices.Contains(pod.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "another"}) {
		return fmt.Sprintf("gates %v", pod.Spec.SchedulingGates)
	}
	return fmt.Sprintf("main=%s init=%s restore=%s", pod.Spec.Containers[0].Image, pod.Spec.InitContainers[0].Image, pod.Annotations[api.RestoreAnnotation])
}

// The first replica that is ready is checkpointed, once. All that come later continue from it, and those
// that came earlier do not.
func TestTemplate(t *testing.T) {
	k := newTest(t)
	first, second := k.comes(made("first")), k.comes(made("second"))
	for range 2 {
		if e := k.says(); !strings.Contains(e, "StartsCold") || !strings.Contains(e, "no checkpoint of its template yet") {
			t.Errorf("the event is %q", e)
		}
	}
	if got := state(first); got != startsCold {
		t.Fatalf("the first one has %s", got)
	}
	var none api.CheckpointList
	k.must(k.client.List(t.Context(), &none))
	if len(none.Items) > 0 {
		t.Fatal("a pod that is not ready is checkpointed")
	}
	k.ready(first)
	k.ready(second)
	c := k.taken()
	if c.Spec != (api.Spec{Pod: "first", Repository: "r.test/team/server", PushSecret: "s"}) || !strings.HasPrefix(c.Name, "server-abc-") || len(c.Status.Template) != 64 {
		t.Errorf("%+v", c)
	}
	if o := c.OwnerReferences; len(o) != 1 || o[0].UID != "rs" || o[0].Controller != nil || !slices.Equal(c.Finalizers, []string{api.ImageFinalizer}) || c.Labels[api.TemplateLabel] != "server" {
		t.Errorf("%+v", c.ObjectMeta)
	}
	if e := k.says(); !strings.Contains(e, "CheckpointBegins") {
		t.Errorf("the event is %q", e)
	}
	if got := state(k.comes(made("early"))); got != startsCold {
		t.Errorf("one that comes before the checkpoint is complete has %s", got)
	}
	if e := k.says(); !strings.Contains(e, "not complete") {
		t.Errorf("the event is %q", e)
	}
	k.succeeds(c)
	later := k.comes(made("later"))
	if got, want := state(later), fmt.Sprintf(continues, c.Name); got != want {
		t.Errorf("one that comes later has %s, want %s", got, want)
	}
	if e := k.says(); !strings.Contains(e, "Continues") || !strings.Contains(e, c.Name) {
		t.Errorf("the event is %q", e)
	}
	k.ready(later)
	k.taken() // no other one
	k.get("second", second)
	if got := state(second); got != startsCold {
		t.Errorf("one that runs has %s", got)
	}
}

// A pod starts cold that is of another template, or whose Checkpoint is not one to continue from.
func TestAnotherTemplate(t *testing.T) {
	for name, c := range map[string]struct {
		pod   func(*corev1.Pod)
		taken func(*api.Checkpoint)
		why   string
	}{
		"the same":          {},
		"another namespace": {pod: func(p *corev1.Pod) { p.Namespace = "other" }, why: "no checkpoint of its template"},
		"another owner":     {pod: func(p *corev1.Pod) { p.OwnerReferences[0].UID = "other" }, why: "no checkpoint of its template"},
		"no owner":          {pod: func(p *corev1.Pod) { p.OwnerReferences = nil }, why: "no controller owns it"},
		"another revision":  {pod: func(p *corev1.Pod) { p.Labels["pod-template-hash"] = "def" }, why: "no checkpoint of its template"},
		"of a StatefulSet":  {pod: func(p *corev1.Pod) { p.Labels["controller-revision-hash"] = "def" }, why: "no checkpoint of its template"},
		"other arguments":   {pod: func(p *corev1.Pod) { p.Spec.Containers[0].Args = []string{"--model=b"} }, why: "no checkpoint of its template"},
		"another image":     {pod: func(p *corev1.Pod) { p.Spec.InitContainers[0].Image = "init:2" }, why: "no checkpoint of its template"},
		"another volume":    {pod: func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts[0].Name = "b" }, why: "no checkpoint of its template"},
		"failed": {taken: func(c *api.Checkpoint) {
			c.Status.Phase, c.Status.CompletionTime = api.Failed, new(metav1.NewTime(start))
		}, why: "has failed: it is made again"},
		"forged":                        {taken: func(c *api.Checkpoint) { c.Status.Template = strings.Repeat("0", 64) }, why: "of another template"},
		"of no replica":                 {taken: func(c *api.Checkpoint) { c.Status.Template = "" }, why: "of another template"},
		"without one of its containers": {taken: func(c *api.Checkpoint) { c.Status.Containers[0].Name = "init" }, why: "lacks the container main"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newTest(t)
			k.ready(k.comes(made("first")))
			taken := k.taken()
			k.succeeds(taken)
			if c.taken != nil {
				c.taken(taken)
				k.must(k.client.Status().Update(t.Context(), taken))
			}
			for k.says() != "" {
			}
			later := made("later")
			if c.pod != nil {
				c.pod(later)
			}
			k.must(k.client.Create(t.Context(), later))
			if _, err := (&templates{cluster: k.cluster}).Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: later.Namespace}}); err != nil {
				t.Fatal(err)
			}
			k.must(k.client.Get(t.Context(), client.ObjectKeyFromObject(later), later))
			cold := strings.HasPrefix(state(later), "main=app:1 init=")
			if e := k.says(); cold != (c.why != "") || !strings.Contains(e, c.why) {
				t.Errorf("it has %s, and the event is %q, want %q", state(later), e, c.why)
			}
		})
	}
}

// A checkpoint that failed is made again after a minute, and after twice as long each time, however many replicas
// come meanwhile. One that is deleted is made again at once, and one that succeeded or is not the controller's is
// left alone.
func TestTemplateAgain(t *testing.T) {
	k := newTest(t)
	replicas := 0
	come := func() {
		replicas++
		pod := made(fmt.Sprintf("replica-%d", replicas))
		pod.CreationTimestamp = metav1.NewTime(k.clock)
		k.ready(k.comes(pod))
	}
	ends := func(phase api.Phase) {
		t.Helper()
		c := k.taken()
		c.Status.Phase, c.Status.CompletionTime = phase, new(metav1.NewTime(k.clock))
		k.must(k.client.Status().Update(t.Context(), c))
	}
	// pruned has the images of those pruned that are deleted, and the namespace looked at for that alone.
	pruned := func() {
		var all api.CheckpointList
		k.must(k.client.List(t.Context(), &all))
		for _, c := range all.Items {
			if c.DeletionTimestamp != nil {
				c.Finalizers = nil
				k.must(k.client.Update(t.Context(), &c))
			}
		}
		k.look()
	}
	come()
	first := k.taken().Name
	for i, wait := range []time.Duration{1, 2, 4, 8} {
		ends(api.Failed)
		for end := k.clock.Add(wait * time.Minute); k.clock.Before(end); k.clock = k.clock.Add(30 * time.Second) {
			if come(); k.taken().Status.Phase == "" {
				t.Fatalf("after failure %d it is made again %s too soon", i+1, end.Sub(k.clock))
			}
		}
		k.look()
		pruned()
		if c := k.taken(); c.Status.Phase != "" || c.Name != fmt.Sprintf("%s-%d", first, i+2) {
			t.Fatalf("after failure %d there is %s, %s", i+1, c.Name, c.Status.Phase)
		}
	}
	ends(api.Failed)
	k.must(k.client.Delete(t.Context(), k.taken()))
	pruned()
	if c := k.taken(); c.Status.Phase != "" || c.Name != first {
		t.Errorf("after one was deleted there is %s, %s", c.Name, c.Status.Phase)
	}
	for _, phase := range []api.Phase{api.Succeeded, api.Failed} {
		ends(phase)
		if phase == api.Failed { // a user's
			c := k.taken()
			c.OwnerReferences = nil
			k.must(k.client.Update(t.Context(), c))
		}
		k.clock = k.clock.Add(48 * time.Hour)
		come()
		if c := k.taken(); c.Status.Phase != phase {
			t.Errorf("one that is not to be made again is: %s, %s", c.Name, c.Status.Phase)
		}
	}
}

// watched has the test say what happens to the objects of a kind that controllers watch.
type watched struct {
	cache.Cache
	cache.Informer

	kind string
	on   chan<- handling // each handler of events
}

type handling struct {
	kind string
	toolscache.ResourceEventHandler
}

func (w watched) Start(ctx context.Context) error { <-ctx.Done(); return nil }

func (watched) WaitForCacheSync(context.Context) bool { return true }

func (w watched) GetInformer(_ context.Context, o client.Object, _ ...cache.InformerGetOption) (cache.Informer, error) {
	w.kind = fmt.Sprintf("%T", o)
	return w, nil
}

func (w watched) AddEventHandlerWithOptions(h toolscache.ResourceEventHandler, _ toolscache.HandlerOptions) (toolscache.ResourceEventHandlerRegistration, error) {
	w.on <- handling{w.kind, h}
	return controllertest.NewFakeInformer(controllertest.Synced).AddEventHandler(h)
}

// The Checkpoints of a template are watched: one that is deleted is made again without a change of a pod.
func TestTemplateLooksAgain(t *testing.T) {
	k := newTest(t)
	k.ready(k.comes(made("first")))
	gone := k.taken()
	gone.Finalizers = nil
	k.must(k.client.Update(t.Context(), gone))
	k.must(k.client.Delete(t.Context(), gone))
	on := make(chan handling)
	m, err := ctrl.NewManager(&rest.Config{Host: "localhost:1"}, ctrl.Options{
		Scheme: k.client.Scheme(), Metrics: server.Options{BindAddress: "0"},
		NewCache:       func(*rest.Config, cache.Options) (cache.Cache, error) { return watched{on: on}, nil },
		NewClient:      func(*rest.Config, client.Options) (client.Client, error) { return k.client, nil },
		MapperProvider: func(*rest.Config, *http.Client) (meta.RESTMapper, error) { return k.client.RESTMapper(), nil },
	})
	k.must(err)
	k.must(Add(m, Options{}))
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- m.Start(ctx) }()
	for limit := time.After(time.Minute); k.client.Get(t.Context(), client.ObjectKeyFromObject(gone), &api.Checkpoint{}) != nil; {
		select {
		case h := <-on:
			if h.kind == fmt.Sprintf("%T", gone) {
				h.OnDelete(gone)
			}
		case <-limit:
			t.Fatal("it is not made again")
		case <-time.After(10 * time.Millisecond):
		}
	}
	stop()
	k.must(<-ended)
}

// An agent that writes the status cannot have the pods of others run an image of another repository.
func TestImagesOfACheckpoint(t *testing.T) {
	for image, want := range map[string]string{
		"r.test:tag": "r.test:tag@sha256:1", "evil.test/a:1": "r.test@sha256:1", "r.test:5000/evil": "r.test@sha256:1", "": "r.test@sha256:1", "r.tester:1": "r.test@sha256:1",
	} {
		k := api.Checkpoint{Spec: api.Spec{Repository: "r.test"}, Status: api.Status{Containers: []api.Container{{Name: "a", Image: image, Digest: "sha256:1"}}}}
		if got := k.Images()["a"]; got != want {
			t.Errorf("%q gives %q, want %q", image, got, want)
		}
	}
}

// A pod that its checkpoint does not start starts cold, and says why. One that takes its time, or runs, is
// left alone.
func TestStuck(t *testing.T) {
	waits := func(reason string, restarts int32) corev1.ContainerStatus {
		return corev1.ContainerStatus{
			Name: "main", RestartCount: restarts, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "of " + reason}},
			LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "StartError", Message: "no room"}},
		}
	}
	runs, another := waits("", 9), waits("CrashLoopBackOff", 9)
	runs.State, another.Name = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}, "init"
	for name, c := range map[string]struct {
		status corev1.ContainerStatus
		why    string
	}{
		"no image":        {waits("ImagePullBackOff", 0), "container main: of ImagePullBackOff"},
		"pulls":           {waits("ContainerCreating", 0), ""},
		"failed once":     {waits("CrashLoopBackOff", 0), ""},
		"failed twice":    {waits("CrashLoopBackOff", 1), "container main: StartError: no room"},
		"is tried again":  {waits("ContainerCreating", 1), ""},
		"runs, not ready": {runs, ""},
		"another fails":   {another, ""},
	} {
		t.Run(name, func(t *testing.T) {
			k := newTest(t)
			k.ready(k.comes(made("first")))
			taken := k.taken()
			k.succeeds(taken)
			later := k.comes(made("later"))
			for k.says() != "" {
			}
			later.Status.ContainerStatuses = []corev1.ContainerStatus{c.status}
			k.must(k.client.Status().Update(t.Context(), later))
			k.look()
			k.get("later", later)
			want := startsCold
			if c.why == "" {
				want = fmt.Sprintf(continues, taken.Name)
			}
			if got := state(later); got != want {
				t.Errorf("it has %s, want %s", got, want)
			}
			if e := k.says(); (e == "") != (c.why == "") || !strings.Contains(e, c.why) || c.why != "" && !strings.HasPrefix(e, "Warning StartsCold") {
				t.Errorf("the event is %q, want %q", e, c.why)
			}
		})
	}
}

// What the cluster does not let in: the pod starts all the same, without a checkpoint.
func TestTemplateRefused(t *testing.T) {
	k := newTest(t)
	k.client = interceptor.NewClient(k.client.(client.WithWatch), interceptor.Funcs{
		Create: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.CreateOption) error {
			if _, ok := o.(*api.Checkpoint); ok && o.GetNamespace() == "ns" && o.GetLabels()[api.TemplateLabel] == "strange" {
				return apierrors.NewForbidden(schema.GroupResource{}, o.GetName(), fmt.Errorf("no such repository"))
			}
			return c.Create(ctx, o, opts...)
		},
		Update: func(ctx context.Context, c client.WithWatch, o client.Object, opts ...client.UpdateOption) error {
			if p, ok := o.(*corev1.Pod); ok && strings.Contains(p.Spec.Containers[0].Image, "r.test") {
				return apierrors.NewForbidden(schema.GroupResource{}, p.Name, fmt.Errorf("images of app alone"))
			}
			return c.Update(ctx, o, opts...)
		},
	})
	k.ready(k.comes(made("first")))
	k.succeeds(k.taken())
	for k.says() != "" {
	}
	if got := state(k.comes(made("later"))); got != startsCold {
		t.Errorf("it has %s", got)
	}
	if e := k.says(); !strings.Contains(e, "images of app alone") {
		t.Errorf("the event is %q", e)
	}
	strange := made("strange")
	strange.OwnerReferences[0].Name, strange.OwnerReferences[0].UID = "strange-abc", "other"
	k.ready(k.comes(strange))
	k.says()
	if e := k.says(); !strings.Contains(e, "CheckpointRefused") {
		t.Errorf("the event is %q", e)
	}
	k.taken() // the first one's
	// However many replicas there are, and whatever happens to them, it is asked for now and then.
	another := strange.DeepCopy()
	another.Name, another.UID, another.ResourceVersion = "another", "another", ""
	k.ready(k.comes(another))
	for k.says() != "" {
	}
	r := &templates{cluster: k.cluster}
	for _, after := range []time.Duration{0, retry - time.Second, time.Second} {
		k.clock = k.clock.Add(after)
		if again, err := r.Reconcile(t.Context(), ctrl.Request{NamespacedName: client.ObjectKey{Namespace: "ns"}}); again.RequeueAfter != retry || err != nil {
			t.Errorf("it is asked for again after %s, %v", again.RequeueAfter, err)
		}
	}
	if len(k.events.Events) != 2 {
		t.Errorf("there are %d events in %s", len(k.events.Events), retry)
	}
}

// Of an owner's templates the newest checkpoints are kept; of others all, whatever label they have.
func TestTemplateKeeps(t *testing.T) {
	k := newTest(t, &api.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "somebodys-own", Labels: map[string]string{api.TemplateLabel: "server"}}, Status: api.Status{Phase: api.Succeeded},
	})
	for i := range keep + 3 {
		for _, family := range []string{"server", "other"} {
			if family == "other" && i >= keep+1 {
				continue
			}
			pod := made(fmt.Sprintf("%s-%d", family, i))
			revision := fmt.Sprintf("r%d", i)
			pod.Labels["pod-template-hash"], pod.OwnerReferences[0].Name = revision, family+"-"+revision
			k.ready(k.comes(pod))
			var all api.CheckpointList
			k.must(k.client.List(t.Context(), &all))
			k.clock = k.clock.Add(time.Minute)
			for _, c := range all.Items {
				if c.Status.Phase == "" {
					c.Status.Phase, c.Status.Template = api.Succeeded, "digest"
					k.must(k.client.Status().Update(t.Context(), &c))
				}
				if c.CreationTimestamp.IsZero() {
					c.CreationTimestamp = metav1.NewTime(k.clock)
					k.must(k.client.Update(t.Context(), &c))
				}
			}
		}
	}
	var all api.CheckpointList
	k.must(k.client.List(t.Context(), &all))
	var left []string
	for _, c := range all.Items {
		if c.DeletionTimestamp == nil {
			left = append(left, c.Name[:strings.LastIndex(c.Name, "-")])
		}
	}
	slices.Sort(left)
	if want := []string{"other-r0", "other-r1", "other-r2", "other-r3", "server-r2", "server-r3", "server-r4", "server-r5", "somebodys"}; !slices.Equal(left, want) {
		t.Errorf("there are %q, want %q", left, want)
	}
}
