// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/client/interceptor"
	"sigs.k8s.io/yaml"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// user is one who has a cluster, and a kubeconfig with the contexts a, of the namespace team, and b.
type user struct {
	*testing.T

	cluster client.WithWatch
	asked   string // the cluster that was
}

func newUser(t *testing.T, objects ...client.Object) *user {
	t.Helper()
	known, err := scheme()
	if err != nil {
		t.Fatal(err)
	}
	config := clientcmdapi.NewConfig()
	for name, namespace := range map[string]string{"a": "team", "b": ""} {
		config.Clusters[name] = &clientcmdapi.Cluster{Server: "https://" + name}
		config.Contexts[name] = &clientcmdapi.Context{Cluster: name, Namespace: namespace}
	}
	config.CurrentContext = "a"
	path := filepath.Join(t.TempDir(), "config")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", path)
	look = time.Millisecond
	c := fake.NewClientBuilder().WithScheme(known).WithStatusSubresource(&api.Checkpoint{}, &api.Migration{}).WithObjects(objects...).Build()
	return &user{T: t, cluster: c}
}

// runs runs the plugin, and returns what it prints and says.
func (u *user) runs(args ...string) (out, errs string, _ error) {
	var printed, said bytes.Buffer
	err := run(u.Context(), args, func(config clientcmd.ClientConfig) (client.Client, error) {
		rest, err := config.ClientConfig()
		if err == nil {
			u.asked = rest.Host
		}
		return u.cluster, err
	}, &printed, &said)
	return printed.String(), said.String(), err
}

func (u *user) get(name string, to client.Object) {
	u.Helper()
	if err := u.cluster.Get(u.Context(), client.ObjectKey{Namespace: "team", Name: name}, to); err != nil {
		u.Fatal(err)
	}
}

func trainer() *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "trainer", Labels: map[string]string{"app": "trainer"}, Annotations: map[string]string{api.Repository: "r.test/team/job", api.PushSecret: "registry"}},
		Spec:       corev1.PodSpec{NodeName: "here", Containers: []corev1.Container{{Name: "main", Image: "app:1"}}},
	}
}

func done() *api.Checkpoint {
	at := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	return &api.Checkpoint{
		ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "done", CreationTimestamp: at},
		Spec:       api.Spec{Pod: "trainer", Repository: "r.test/team/job", PushSecret: "registry"},
		Status: api.Status{
			Phase: api.Succeeded, Node: "here", Bytes: 3 << 30, StartTime: &at, CompletionTime: &at,
			Containers: []api.Container{{Name: "main", Image: "r.test/team/job:done", Digest: "sha256:1", Bytes: 3 << 30, Pushed: 5 << 20, Push: metav1.Duration{Duration: time.Second}}},
			Conditions: []metav1.Condition{{Type: api.Complete, Reason: "Pushed", Message: "all is in the registry", Status: metav1.ConditionTrue, LastTransitionTime: at}},
		},
	}
}

// A checkpoint goes where the flags say, or else the pod's annotations.
func TestCheckpoint(t *testing.T) {
	for args, want := range map[string]api.Spec{
		"":                                  {Pod: "trainer", Repository: "r.test/team/job", PushSecret: "registry"},
		"-c main --to r.test/a:current":     {Pod: "trainer", Container: "main", Repository: "r.test/a", Tag: "current", PushSecret: "registry"},
		"--to r.test:5000/a":                {Pod: "trainer", Repository: "r.test:5000/a", PushSecret: "registry"},
		"--to r.test:5000/a:b":              {Pod: "trainer", Repository: "r.test:5000/a", Tag: "b", PushSecret: "registry"},
		"--to r.test:5000 --push-secret s ": {Pod: "trainer", Repository: "r.test:5000", PushSecret: "s"},
	} {
		u := newUser(t, trainer())
		out, _, err := u.runs(append([]string{"checkpoint", "trainer", "--name", "k"}, strings.Fields(args)...)...)
		if err != nil || out != "checkpoint.gpuckpt.dev/k created\n" {
			t.Errorf("%q: %q, %v", args, out, err)
			continue
		}
		var k api.Checkpoint
		u.get("k", &k)
		if k.Spec != want {
			t.Errorf("%q: %+v, want %+v", args, k.Spec, want)
		}
	}
	u := newUser(t, trainer())
	if out, _, err := u.runs("checkpoint", "trainer"); err != nil || !regexp.MustCompile(`/trainer-\d{4}-\d{6} created\n$`).MatchString(out) {
		t.Errorf("%q, %v", out, err)
	}
}

// The plugin takes the same cluster and namespace as kubectl.
func TestContext(t *testing.T) {
	for args, want := range map[string]string{
		"": "https://a team", "-n other": "https://a other", "--context b": "https://b default", "--context=b --namespace=x": "https://b x", "--server=https://c": "https://c team",
	} {
		u := newUser(t)
		_, _, err := u.runs(append([]string{"logs", "nothing"}, strings.Fields(args)...)...)
		if err == nil {
			t.Fatal("there are logs of nothing")
		}
		namespace := regexp.MustCompile(`namespace (\S+):`).FindStringSubmatch(err.Error())
		if got := u.asked + " " + namespace[1]; got != want {
			t.Errorf("%q: %s, want %s", args, got, want)
		}
	}
}

// With --wait the stages are shown until the object is over, and what has failed fails.
func TestWait(t *testing.T) {
	states := []api.Status{
		{},
		{Conditions: []metav1.Condition{{Type: api.Waiting, Reason: api.NoAgent, Message: "no agent works"}}},
		{Phase: api.Running, Stage: api.Checkpointing},
		{Phase: api.Running, Stage: api.Pushing, Bytes: 5 << 30},
		{Phase: api.Running, Stage: api.Pushing, Bytes: 5 << 30},
		{Phase: api.Succeeded, Conditions: []metav1.Condition{{Type: api.Complete}}},
	}
	u := newUser(t, trainer())
	at := 0
	u.cluster = interceptor.NewClient(u.cluster, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		err := c.Get(ctx, key, o, opts...)
		if k, ok := o.(*api.Checkpoint); ok && err == nil {
			at++
			k.Status = states[at]
		}
		return err
	}})
	out, errs, err := u.runs("checkpoint", "trainer", "--name", "k", "--wait")
	if want := "Waiting: NoAgent: no agent works\nCheckpointing\nPushing, 5.0 GiB checkpointed, 0 % pushed\n"; err != nil || errs != want || !strings.HasSuffix(out, "\nComplete\n") {
		t.Errorf("it prints %q and says %q, want %q: %v", out, errs, want, err)
	}
	at = 0
	states = []api.Status{{}, {Phase: api.Failed, Conditions: []metav1.Condition{{Type: api.HasFailed, Reason: "PushFailed", Message: "no room\x1b[2J"}}}}
	if _, _, err := u.runs("checkpoint", "trainer", "--name", "l", "--wait"); err == nil || err.Error() != "PushFailed: no room�[2J" {
		t.Errorf("%v", err)
	}
}

// A Migration goes through its checkpoint to the new pod.
func TestMigrate(t *testing.T) {
	u := newUser(t, trainer())
	at := 0
	u.cluster = interceptor.NewClient(u.cluster, interceptor.Funcs{Get: func(ctx context.Context, c client.WithWatch, key client.ObjectKey, o client.Object, opts ...client.GetOption) error {
		if k, ok := o.(*api.Checkpoint); ok && at > 0 {
			k.Status.Stage = api.Checkpointing
			return nil
		}
		err := c.Get(ctx, key, o, opts...)
		if m, ok := o.(*api.Migration); ok && err == nil {
			m.Status.To, m.Status.Conditions = "there", [][]metav1.Condition{
				nil, {{Type: api.Checkpointed, Status: metav1.ConditionTrue}}, {{Type: api.Complete, Status: metav1.ConditionTrue}},
			}[min(at, 2)]
			at++
		}
		return err
	}})
	_, errs, err := u.runs("migrate", "trainer", "--name", "m", "--to-node", "there", "--wait")
	if want := "Checkpointing\nRestoring on there\n"; err != nil || errs != want {
		t.Errorf("it says %q, want %q: %v", errs, want, err)
	}
	var m api.Migration
	u.get("m", &m)
	if m.Spec.Pod != "trainer" || m.Spec.NodeName != "there" || m.Spec.Repository != "r.test/team/job" || m.Spec.PushSecret != "registry" {
		t.Errorf("%+v", m.Spec)
	}
}

// restore prints a pod that continues, which nothing owns.
func TestRestore(t *testing.T) {
	owned := trainer()
	owned.Name, owned.OwnerReferences = "owned", []metav1.OwnerReference{{Kind: "ReplicaSet", Name: "r", UID: "1", Controller: new(true)}}
	owned.Annotations = map[string]string{api.Refused: "no room"}
	u := newUser(t, trainer(), owned, done())
	out, _, err := u.runs("restore", "done")
	if err != nil {
		t.Fatal(err)
	}
	var pod corev1.Pod
	if err := yaml.UnmarshalStrict([]byte(out), &pod); err != nil {
		t.Fatal(err)
	}
	if pod.Name != "done" || pod.Spec.NodeName != "" || pod.Spec.Containers[0].Image != "r.test/team/job:done@sha256:1" || pod.Annotations[api.RestoreAnnotation] != "true" || pod.Labels["app"] != "trainer" {
		t.Errorf("it prints\n%s", out)
	}
	if s := pod.Spec.ImagePullSecrets; len(s) != 1 || s[0].Name != "registry" {
		t.Errorf("it pulls with %v", s)
	}
	out, _, err = u.runs("restore", "done", "--name", "again", "--like", "owned")
	pod = corev1.Pod{}
	if err := errors.Join(err, yaml.UnmarshalStrict([]byte(out), &pod)); err != nil || pod.Name != "again" {
		t.Fatal(out, err)
	}
	if len(pod.Labels) > 0 || len(pod.OwnerReferences) > 0 || pod.Annotations[api.Refused] != "" {
		t.Errorf("its owner would take it, or it ends without a checkpoint: %+v", pod.ObjectMeta)
	}
	if _, _, err := u.runs("restore", "done", "--like", "gone"); err == nil || !strings.Contains(err.Error(), "main:r.test/team/job:done@sha256:1") {
		t.Errorf("%v", err)
	}
}

// ls has a line for each object, and logs has all that is known of one.
func TestListAndLogs(t *testing.T) {
	at := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 6, 0, time.UTC))
	event := func(name, kind, of, group, reason string) *corev1.Event {
		return &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: name}, InvolvedObject: corev1.ObjectReference{Kind: kind, Name: of, APIVersion: group}, Reason: reason, Message: "said\x1b[2J", LastTimestamp: at}
	}
	half := done() // a container is pushed, another is not
	half.Name, half.Status.CompletionTime = "half", nil
	if out, _, err := newUser(t, half).runs("logs", "half"); err != nil || !strings.Contains(out, "container main: 3.0 GiB") {
		t.Errorf("%v\n%s", err, out)
	}
	u := newUser(t, done(),
		&api.Migration{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "m", CreationTimestamp: at}, Spec: api.MigrationSpec{Pod: "trainer"}, Status: api.MigrationStatus{
			From: "here", To: "there", NewPod: "m", StartTime: &at, Conditions: []metav1.Condition{{Type: api.HasFailed, Reason: "RestoreFailed", Message: "no room", LastTransitionTime: at}},
		}},
		event("1", "Pod", "trainer", "v1", "Checkpointed"), event("2", "Pod", "other", "v1", "Other"), event("3", "Checkpoint", "done", "gpuckpt.dev/v1alpha1", "Pushed"), event("4", "Deployment", "done", "apps/v1", "Other"))
	out, _, err := u.runs("ls")
	if want := `(?s)^NAME +KIND +POD +STATE +SIZE +NODE +AGE +IMAGE\ndone +Checkpoint +trainer +Succeeded +3\.0 GiB +here +\S+ +r\.test/team/job:done\nm +Migration +trainer +Failed: RestoreFailed +0\.0 MiB +here → there +\S+ +\n$`; err != nil || !regexp.MustCompile(want).MatchString(out) {
		t.Errorf("%v\n%s", err, out)
	}
	out, _, err = u.runs("logs", "done")
	if want := `^03:04:05  Checkpoint  begins
03:04:05  Checkpoint  Complete \(Pushed\): all is in the registry
03:04:05  Checkpoint  container main: 3.0 GiB, checkpoint 0s, image 0s, push 1s of 5.0 MiB: r.test/team/job:done@sha256:1
03:04:06  Pod trainer  Checkpointed: said�\[2J
03:04:06  Checkpoint done  Pushed: said�\[2J
$`; err != nil || !regexp.MustCompile(want).MatchString(out) {
		t.Errorf("%v\n%s", err, out)
	}
	if out, _, err = u.runs("logs", "m"); err != nil || !strings.Contains(out, "Failed (RestoreFailed): no room") {
		t.Errorf("%v\n%s", err, out)
	}
}

// What a command does not take is refused, before anything is made.
func TestRefused(t *testing.T) {
	for args, want := range map[string]string{
		"": "name a command", "restart a": "is no command", "checkpoint": "takes the name of one POD", "checkpoint a b": "takes the name of one POD", "ls a": "ls takes no name",
		"ls --wait": "ls has no flag --wait", "restore done --to r.test/a": "restore has no flag --to", "checkpoint bare": "Give --to REPOSITORY", "checkpoint gone": "not found",
		"migrate trainer --to r.test/a:b": "without a tag", "restore half": "is not complete", "checkpoint trainer --sooner": "unknown flag",
	} {
		bare, half := trainer(), done()
		bare.Name, bare.Annotations, half.Name, half.Status.Phase = "bare", nil, "half", api.Running
		u := newUser(t, trainer(), bare, half)
		if _, _, err := u.runs(strings.Fields(args)...); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", args, err, want)
		}
		var made api.MigrationList
		if err := u.cluster.List(t.Context(), &made); err != nil || len(made.Items) > 0 {
			t.Errorf("%q made %v", args, made.Items)
		}
	}
}
