// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images/capture"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// A server's way through a cluster, with the manifests of deploy/ as they are, which are the chart's
// defaults: two machines that know nothing of gpuckpt get it, a server that has started cold on one is
// checkpointed and pushed, and goes on on the other, ready when it answers. A machine that joins later
// restores it as well.
func TestJourney(t *testing.T) {
	result := results.Add(t)
	needs(t, "gpuckpt-agent")
	needs(t, "kube-controller-manager")
	if _, err := exec.LookPath("ip"); err != nil {
		needs(t, "ip")
	}
	j := &journey{}
	j.machine(t, node.Options{APIServer: true, Controllers: true})
	j.machine(t, node.Options{})
	n := j.nodes[0]
	go func() {
		if err := n.Schedule(t.Context()); err != nil {
			t.Errorf("the scheduler: %v", err)
		}
	}()
	givePullSecret(t, n)
	pushWorkload(t, n, "server:1")

	began := time.Now()
	step := func(what string) {
		t.Logf("%5.1f s  %s", time.Since(began).Seconds(), what)
	}
	j.kubectl(t, "apply", "-k", filepath.Join(sourceDir(t), "deploy", "node"))
	j.kubectl(t, "apply", "-k", filepath.Join(sourceDir(t), "deploy", "agent"))
	j.kubectl(t, "label", "nodes", "--all", "nvidia.com/gpu.present=true") // as GPU Feature Discovery does
	j.rolledOut(t)
	step("gpuckpt is on all nodes")

	j.kubectl(t, "annotate", "namespace", "default", "gpuckpt.dev/repositories="+n.Registry().Host+"/team")
	j.apply(t, j.server("cold", n.Registry().Host+"/server:1", n.Name(), nil))
	j.count(t, "cold", "101")
	step("the first server answers, started cold")
	disk := exec.Command("sh", "-ec", `mkdir -p "$0"; mount -t tmpfs checkpoints "$0"`, capture.DefaultDir) // it is mounted when the agent runs
	if out, err := n.MachineCommand(disk).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	j.checkpoint(t, "warm", "cold")
	step("its checkpoint is in the registry")
	j.count(t, "cold", "102") // it runs on

	image := j.image(t, "warm")
	j.apply(t, j.server("elsewhere", image, j.nodes[1].Name(), restoring))
	j.count(t, "elsewhere", "102")
	step("the second server answers, restored on the other node")
	j.said(t, "elsewhere", "Restored")
	j.noted(t, 1, "elsewhere", true)
	j.checkpoint(t, "again", "elsewhere") // its image has the note of the restore

	third := j.machine(t, node.Options{})
	j.kubectl(t, "label", "node", third.Name(), "nvidia.com/gpu.present=true")
	j.rolledOut(t)
	step("a third node has joined")
	j.apply(t, j.server("joined", image, third.Name(), restoring))
	j.count(t, "joined", "102")
	step("the third server answers, restored there")
	j.kubectl(t, "delete", "deployment", "joined", "--cascade=foreground")
	j.firstAnswers(t, result, third, image)
	step("first answers are measured")
	if gpu.Kind != harness.SoftwareGPU {
		return // the driver of no other is replaced so easily
	}

	// A node with another driver says why it cannot, and starts the server cold if that is preferred.
	softwareGPU(t, third, "driver=999.1\n")
	j.apply(t, j.server("refused", image, third.Name(), restoring))
	if why := j.said(t, "refused", "RestoreFailed"); !strings.Contains(why, "999.1") {
		t.Errorf("the event says %s", why)
	}
	j.apply(t, j.server("preferred", j.image(t, "again"), third.Name(), map[string]string{"dev.gpuckpt.restore": "prefer"}))
	j.count(t, "preferred", "101")
	step("a server answers, started cold where it cannot be restored")
	if why := j.said(t, "preferred", "StartedAfresh"); !strings.Contains(why, "999.1") {
		t.Errorf("the event says %s", why)
	}
	j.noted(t, 2, "preferred", false)
	t.Run("replicas", j.testReplicas)
	t.Run("moves", j.testMoves) // first: a kubelet that is restarted has no GPUs for new pods, since nobody offers them again
	t.Run("restarts", j.testRestarts)
	step("done")
}

// journeyState is how much GPU memory the servers have, and how often their restore is timed.
func journeyState() (bytes string, runs int) {
	if gpu.Kind == harness.SoftwareGPU {
		return "1M", 1
	}
	return "4G", 3
}

// firstAnswers measures, on a node that has nothing of an image, how long it takes from the begin until the first
// answer: of a pod, and of a container that "gpuckpt restore" restores.
func (j *journey) firstAnswers(t *testing.T, result *harness.TestResult, n *node.Node, image string) {
	t.Helper()
	const name = "timed"
	bytes, runs := journeyState()
	pod := j.server(name, image, n.Name(), restoring)["spec"].(map[string]any)["template"].(map[string]any)
	pod["apiVersion"], pod["kind"], pod["metadata"] = "v1", "Pod", map[string]any{"name": name, "annotations": restoring}
	gpuckpt := func(n *node.Node, args ...string) *exec.Cmd {
		cmd, err := n.Command(t.Context(), "gpuckpt", append(args, "--address", n.Address(), "--namespace", node.Namespace)...)
		if err != nil {
			t.Fatal(err)
		}
		cmd.Env = append(cmd.Env, "DOCKER_CONFIG="+credentialsDir(j.nodes[0]))
		return n.MachineCommand(cmd)
	}
	// Networks of pods are their sandboxes': what the command line restores is a container that had the host's.
	first := j.nodes[0]
	k, err := first.Run(t.Context(), harness.RunSpec{
		ID: "plain", Image: first.Registry().Host + "/server:1", GPUs: []int{0},
		Args: []string{"/usr/bin/gpuwork", "web", "--port", strconv.Itoa(counterPort), "--bytes", bytes},
	})
	if err != nil {
		t.Fatal(err)
	}
	firstAnswer(t, first.IP())
	plain := first.Registry().Host + "/team/plain:1"
	if out, err := gpuckpt(first, "checkpoint", k.ID, "--push", plain).CombinedOutput(); err != nil {
		t.Fatalf("gpuckpt checkpoint: %v: %s", err, out)
	}
	k.MustRemove(t)
	images := map[string]string{"pod": image, "restore": plain}
	ways := map[string]func() (ip string, end func()){
		"pod": func() (string, func()) {
			j.apply(t, pod)
			found, err := n.WaitFor(t.Context(), name, func(p node.Pod) bool { return p.Status.PodIP != "" })
			if err != nil {
				t.Fatal(err)
			}
			return found.Status.PodIP, func() { j.kubectl(t, "delete", "pod", name) }
		},
		"restore": func() (string, func()) {
			cmd := gpuckpt(n, "restore", plain, "--pull", "--quiet", "--name", name, "--net-host", "--gpus", "0")
			var said strings.Builder
			cmd.Stderr = &said
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			return n.IP(), func() {
				if err := cmd.Wait(); err != nil {
					t.Fatalf("gpuckpt restore: %v: %s", err, said.String())
				}
				n.Adopt(name, counterPort).MustRemove(t)
			}
		},
	}
	for way, begin := range ways {
		var seconds []float64
		for range runs {
			for _, image := range images { // the two have blobs in common
				j.forget(t, n, image)
			}
			began := time.Now()
			ip, end := begin()
			answer := firstAnswer(t, ip)
			seconds = append(seconds, time.Since(began).Seconds())
			if answer != "102" {
				t.Fatalf("%s: the server answers %s, want 102", way, answer)
			}
			end()
		}
		t.Logf("%s: %.2f s until the first answer", way, seconds)
		slices.Sort(seconds)
		result.Number("first_answer_by_"+way+"_seconds", seconds[runs/2])
	}
}

// firstAnswer asks a server to count until it answers. A connection that came before the program ran may be lost.
func firstAnswer(t *testing.T, ip string) string {
	t.Helper()
	address := "http://" + net.JoinHostPort(ip, strconv.Itoa(counterPort)) + "/count"
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		answer, err := http.Get(address)
		if err == nil {
			defer answer.Body.Close()
			text, err := io.ReadAll(answer.Body)
			if err != nil {
				t.Fatal(err)
			}
			return string(text)
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("no answer in a minute: %v", err)
		}
	}
}

// forget removes all of a checkpoint image from a node.
func (j *journey) forget(t *testing.T, n *node.Node, image string) {
	t.Helper()
	list, err := n.Client().ImageService().List(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, i := range list {
		if i.Name == image || strings.HasSuffix(image, "@"+i.Target.Digest.String()) {
			if err := n.RemoveImage(t.Context(), i.Name); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// envRestarts is "all" to restart each program at each stage.
const envRestarts = "GPUCKPT_TEST_RESTARTS"

// Whatever is restarted, and when: a Checkpoint is over afterwards, and done once at most, and its pod runs
// on. But for one all are complete: CRI does not know a container again that was paused when containerd ended.
func (j *journey) testRestarts(t *testing.T) {
	n, all := j.nodes[0], os.Getenv(envRestarts) == "all"
	pod := apply(t, n, "restarts", counter{class: "gpuckpt"})
	count, made := 100, 0
	counts := func() {
		t.Helper()
		count++
		expect(t, pod, counterPort, strconv.Itoa(count))
	}
	counts()
	restarts := j.restarts(t, n)
	for _, what := range []struct {
		name          string
		first, second string // what comes of the Checkpoint, at each stage
	}{
		{"controller", "Complete", "Complete"},
		{"kubelet", "Complete", "Complete"},
		{"containerd", "Failed", "Complete"},
		{"agent", "Complete", "Complete"},
		{"agent-killed", "Complete", "Complete"},
	} {
		for stage, want := range map[string]string{"Checkpointing": what.first, "Pushing": what.second} {
			agents := strings.HasPrefix(what.name, "agent")
			if !all && stage != "Pushing" && !agents {
				continue
			}
			name := strings.ToLower(what.name + "-" + stage)
			made++
			if agents && stage == "Checkpointing" {
				made++ // what the shim has dumped before another agent is there is of no use
			}
			goesOn := j.stays(t, n, stage)
			j.make(t, name, "restarts")
			if stage == "Checkpointing" {
				paused(t, n, pod)
			} else {
				within(t, "it is pushed", n.Registry().Held)
				counts()
			}
			if agents && stage == "Pushing" { // what has no image yet is done again
				prefix := "gpuckpt.invalid/Checkpoint/" + j.kubectl(t, "get", "checkpoint", name, "--output", "jsonpath={.metadata.uid}")
				within(t, "its image is there", func() bool {
					return slices.ContainsFunc(objects{n: n}.ours(t), func(image string) bool { return strings.HasPrefix(image, prefix) })
				})
			}
			restarts[what.name]()
			if agents { // which waits for the dump that the other one has asked for
				within(t, "the Checkpoint goes on", func() bool {
					return j.kubectl(t, "get", "checkpoint", name, "--output", "jsonpath={.status.restarts}") != ""
				})
			}
			goesOn()
			var over string
			within(t, "the Checkpoint is over", func() bool {
				over = j.kubectl(t, "get", "checkpoint", name, "--output", "jsonpath={.status.conditions[?(@.status==\"True\")].type}: {.status.conditions[*].message}")
				return strings.HasPrefix(over, "Complete") || strings.HasPrefix(over, "Failed")
			})
			t.Logf("%s restarted while it is %s: %s", what.name, stage, over)
			if again := j.kubectl(t, "get", "checkpoint", name, "--output", "jsonpath={.status.restarts}"); stage == "Pushing" && again != "" != agents {
				t.Errorf("%s restarted while it is %s: the Checkpoint knows of %q restarts", what.name, stage, again)
			}
			if !strings.HasPrefix(over, want) {
				t.Errorf("%s restarted while it is %s: %s, want %s", what.name, stage, over, want)
			}
			if what.name == "containerd" && stage == "Checkpointing" {
				var err error
				if pod, err = n.WaitFor(t.Context(), "restarts", func(p node.Pod) bool {
					return p.Ready() && p.Status.ContainerStatuses[0].RestartCount > 0
				}); err != nil {
					t.Fatal(err)
				}
				count = 100
			}
			counts()
			if times := j.checkpointed(t); times > made {
				t.Errorf("%s restarted while it is %s: %d Checkpoints were done %d times", what.name, stage, made, times)
			}
		}
	}
	j.make(t, "after-all", "restarts")
	j.kubectl(t, "wait", "--for=condition=Complete", "checkpoint/after-all", "--timeout=180s")
	counts()
}

// Whatever of the cluster's programs is restarted, and when: a Migration has the pod go on elsewhere, once.
func (j *journey) testMoves(t *testing.T) {
	all := os.Getenv(envRestarts) == "all"
	from, to := j.nodes[0], j.nodes[1]
	name, count := "moves", 101
	pod := apply(t, from, name, counter{class: "gpuckpt"})
	expect(t, pod, counterPort, strconv.Itoa(count))
	for _, what := range []string{"agent", "agent-killed", "controller"} {
		for _, stage := range []string{"Checkpointing", "Pushing", "Restoring"} {
			if !all && (what != "agent" || stage != "Pushing") {
				continue
			}
			next := strings.ToLower("moves-" + what + "-" + stage)
			removed(t, from, next)
			at := from
			if stage == "Restoring" {
				at = to
			}
			goesOn := j.stays(t, at, stage)
			j.apply(t, map[string]any{
				"apiVersion": "gpuckpt.dev/v1alpha1", "kind": "Migration", "metadata": map[string]any{"name": next},
				"spec": map[string]any{"pod": name, "nodeName": to.Name(), "repository": j.nodes[0].Registry().Host + "/team/moves", "pushSecret": pullSecret},
			})
			switch stage {
			case "Checkpointing":
				paused(t, from, pod)
			case "Pushing":
				within(t, "it is pushed", j.nodes[0].Registry().Held)
			default:
				within(t, "it is restored", func() bool {
					return j.kubectl(t, "get", "events", "--field-selector", "involvedObject.kind=Pod,involvedObject.name="+next+",reason=Pulled", "--output", "name") != ""
				})
			}
			j.restarts(t, at)[what]()
			goesOn()
			j.kubectl(t, "wait", "--for=condition=Complete", "migration/"+next, "--timeout=180s")
			t.Logf("%s restarted while it is %s: it has moved", what, stage)
			var err error
			if pod, err = to.WaitReady(t.Context(), next); err != nil {
				t.Fatal(err)
			}
			count++
			expect(t, pod, counterPort, strconv.Itoa(count))
			if left := j.kubectl(t, "get", "pod", name, "--ignore-not-found"); left != "" {
				t.Errorf("there is still %s", left)
			}
			name, from, to = next, to, from
		}
	}
}

// restarts returns what restarts the programs of a node, and the controller.
func (j *journey) restarts(t *testing.T, n *node.Node) map[string]func() {
	program := func(name, node string) func() {
		return func() {
			j.kubectl(t, "delete", "pod", "--namespace", "gpuckpt", "--selector", "app.kubernetes.io/name=gpuckpt-"+name, "--field-selector", node)
			j.rolledOut(t)
		}
	}
	daemon := func(restart func(context.Context) error) func() {
		return func() {
			if err := restart(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	return map[string]func(){
		"controller": program("controller", ""), "agent": program("agent", "spec.nodeName="+n.Name()),
		"kubelet": daemon(n.RestartKubelet), "containerd": daemon(n.Restart),
		"agent-killed": func() {
			was := j.agent(t, n, 0)
			if err := syscall.Kill(was, syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			j.agent(t, n, was)
		},
	}
}

// stays has what is done on a node stay at a stage, from now until the returned function is called.
func (j *journey) stays(t *testing.T, n *node.Node, stage string) (goesOn func()) {
	switch stage {
	case "Checkpointing":
		return softwareGPU(t, n, "checkpoint_delay_ms=10000\n")
	case "Restoring":
		return softwareGPU(t, n, "restore_delay_ms=10000\n")
	}
	release := sync.OnceFunc(j.nodes[0].Registry().Hold())
	t.Cleanup(release)
	return release
}

// agent waits for an agent's process on a node, which is another one than was.
func (j *journey) agent(t *testing.T, n *node.Node, was int) (pid int) {
	t.Helper()
	within(t, "there is an agent", func() bool {
		id := j.kubectl(t, "get", "pods", "--namespace", "gpuckpt", "--selector", "app.kubernetes.io/name=gpuckpt-agent", "--field-selector", "spec.nodeName="+n.Name(), "--output", "jsonpath={.items[0].status.containerStatuses[0].containerID}")
		var err error
		pid, err = n.Pid(t.Context(), strings.TrimPrefix(id, "containerd://"))
		return err == nil && pid > 0 && pid != was
	})
	return pid
}

// checkpointed returns how often the pod of testRestarts was checkpointed, as far as its events say.
func (j *journey) checkpointed(t *testing.T) int {
	t.Helper()
	total := 0
	for count := range strings.FieldsSeq(j.kubectl(t, "get", "events", "--field-selector", "involvedObject.kind=Pod,involvedObject.name=restarts,reason=Checkpointed", "--output", "jsonpath={.items[*].count}")) {
		n, err := strconv.Atoi(count)
		if err != nil {
			t.Fatal(err)
		}
		total += n
	}
	return total
}

// journey is a cluster of machines.
type journey struct{ nodes []*node.Node }

// machine starts a machine and has it join the cluster, if there is one.
func (j *journey) machine(t *testing.T, opts node.Options) *node.Node {
	t.Helper()
	opts.Machine, opts.KubeletAsks, opts.Runtime = true, true, "runc"
	opts.Runtimes = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]\nruntime_type = \"io.containerd.runc.v2\"\n"
	if len(j.nodes) > 0 {
		opts.Join, opts.Name = j.nodes[0], fmt.Sprintf("gpuckpt-node-%d", len(j.nodes)+1)
	}
	n := own(t, opts)
	j.nodes = append(j.nodes, n)
	importNodeImage(t, n)
	ended := make(chan struct{})
	t.Cleanup(func() { <-ended })
	go func() {
		defer close(ended)
		if err := n.Systemd(t.Context(), func() { t.Logf("containerd of %s was restarted", n.Name()) }); err != nil {
			t.Errorf("systemd of %s: %v", n.Name(), err)
		}
	}()
	return n
}

// kubectl runs kubectl, and ends the test on an error with what the cluster says of it.
func (j *journey) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := j.nodes[0].Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s", err, j.state())
	}
	return out
}

func (j *journey) state() string {
	said := ""
	for _, args := range []string{
		"get pods --all-namespaces --output wide", "get events --all-namespaces", "get checkpoints,nodekeys --output yaml",
		"logs --namespace gpuckpt --selector app.kubernetes.io/name=gpuckpt-agent --tail=20 --prefix", "logs --namespace gpuckpt deployment/gpuckpt-controller --tail=20",
		"logs --namespace gpuckpt --selector app.kubernetes.io/name=gpuckpt-node --container install --tail=20 --prefix",
	} {
		out, err := j.nodes[0].Kubectl(session.Context(), strings.Fields(args)...)
		said += fmt.Sprintf("\n%s: %v\n%s", args, err, out)
	}
	for _, n := range j.nodes {
		said += n.Name() + "\n" + n.LogTail(2000) + "\n" + n.KubeletLog(2000)
	}
	return said
}

// rolledOut waits until what is installed is ready.
func (j *journey) rolledOut(t *testing.T) {
	t.Helper()
	for _, what := range []string{"daemonset/gpuckpt-node", "daemonset/gpuckpt-agent", "deployment/gpuckpt-controller"} {
		j.kubectl(t, "rollout", "status", "--namespace", "gpuckpt", what, "--timeout=120s")
	}
}

// server is a Deployment of an HTTP server that uses a GPU, for one node, ready when it answers.
func (j *journey) server(name, image, on string, annotations map[string]string) map[string]any {
	labels := map[string]string{"app": name}
	bytes, _ := journeyState()
	return map[string]any{
		"apiVersion": "apps/v1", "kind": "Deployment", "metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"selector": map[string]any{"matchLabels": labels},
			"template": map[string]any{
				"metadata": map[string]any{"labels": labels, "annotations": annotations},
				"spec": map[string]any{
					"runtimeClassName": "gpuckpt", "terminationGracePeriodSeconds": 1, "nodeSelector": map[string]string{"kubernetes.io/hostname": on},
					"imagePullSecrets": []any{map[string]any{"name": pullSecret}},
					"containers": []any{map[string]any{
						"name": "server", "image": image, "args": []string{"web", "--port", strconv.Itoa(counterPort), "--bytes", bytes},
						"resources":      map[string]any{"limits": map[string]any{node.Resource: "1"}},
						"readinessProbe": map[string]any{"periodSeconds": 1, "httpGet": map[string]any{"path": "/ready", "port": counterPort}},
					}},
				},
			},
		},
	}
}

func (j *journey) apply(t *testing.T, object map[string]any) {
	t.Helper()
	data, err := json.Marshal(object)
	if err == nil {
		err = j.nodes[0].Apply(t.Context(), string(data))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// checkpoint has the pod of a server checkpointed and pushed.
func (j *journey) checkpoint(t *testing.T, name, server string) {
	t.Helper()
	j.make(t, name, j.kubectl(t, "get", "pods", "--selector", "app="+server, "--output", "jsonpath={.items[0].metadata.name}"))
	j.kubectl(t, "wait", "--for=condition=Complete", "checkpoint/"+name, "--timeout=180s")
}

// make makes a Checkpoint of a pod.
func (j *journey) make(t *testing.T, name, pod string) {
	t.Helper()
	j.apply(t, map[string]any{
		"apiVersion": "gpuckpt.dev/v1alpha1", "kind": "Checkpoint", "metadata": map[string]any{"name": name},
		"spec": map[string]any{"pod": pod, "repository": j.nodes[0].Registry().Host + "/team/server", "pushSecret": pullSecret},
	})
}

// image is the image of a Checkpoint, by its digest.
func (j *journey) image(t *testing.T, checkpoint string) string {
	t.Helper()
	return j.kubectl(t, "get", "checkpoint", checkpoint, "--output", "jsonpath={.status.containers[0].image}@{.status.containers[0].digest}")
}

// noted reports an error unless a server on a node finds that it was restored, or does not.
func (j *journey) noted(t *testing.T, on int, server string, want bool) {
	t.Helper()
	id := j.kubectl(t, "get", "pods", "--selector", "app="+server, "--output", "jsonpath={.items[0].status.containerStatuses[0].containerID}")
	pid, err := j.nodes[on].Pid(t.Context(), strings.TrimPrefix(id, "containerd://"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(fmt.Sprintf("/proc/%d/root/run/gpuckpt/restored", pid)); want != (err == nil) {
		t.Errorf("%s has /run/gpuckpt/restored? %v", server, err)
	}
}

// count waits until a server is ready, and asks it to count.
func (j *journey) count(t *testing.T, server, want string) {
	t.Helper()
	j.kubectl(t, "rollout", "status", "deployment/"+server, "--timeout=180s")
	address := j.kubectl(t, "get", "pods", "--selector", "app="+server, "--output", "jsonpath={.items[0].status.podIP}")
	if answer := get(t, "http://"+net.JoinHostPort(address, strconv.Itoa(counterPort))+"/count"); answer != want {
		t.Fatalf("the server %s answers %s, want %s", server, answer, want)
	}
}

// said waits for an event of a server's pod.
func (j *journey) said(t *testing.T, server, reason string) string {
	t.Helper()
	pod := j.kubectl(t, "get", "pods", "--selector", "app="+server, "--output", "jsonpath={.items[0].metadata.name}")
	var message string
	within(t, server+" has an event "+reason, func() bool {
		message = j.kubectl(t, "get", "events", "--field-selector", "involvedObject.kind=Pod,involvedObject.name="+pod+",reason="+reason, "--output", "jsonpath={.items[*].message}")
		return message != ""
	})
	return message
}
