// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
	"github.com/gpuckpt/gpuckpt/integration/workloads/hostroot"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

const (
	programSteps = 200
	programFile  = "/tmp/steps"
)

// Programs as people run them, in pods with default settings: the kubelet checkpoints each three
// times, each time the pod ends and another one is run of what the kubelet wrote. The lines are
// those of a pod that nobody interrupted.
func TestPrograms(t *testing.T) {
	cuda := gpu.Kind == harness.RealGPU
	python, err := hostroot.FindPython(t.Context(), cuda)
	if err != nil {
		t.Skip(err)
	}
	n := own(t, node.Options{})
	dropDriverMounts(t, n)
	pods := programPods{n: n, python: python, cuda: cuda}
	pods.stage(t)
	rounds, run := 3, []programs.Program{programs.Named("multiprocessing"), programs.Named("dataloader"), programs.Named("jax"), programs.Named("compile")}
	if !cuda { // the same without its GPU memory; the others need PyTorch or JAX
		rounds, run = 1, []programs.Program{withArgs(run[0], "--device", "none")}
	}
	for _, p := range run {
		t.Run(p.Name, func(t *testing.T) {
			t.Parallel()
			result := results.Add(t)
			ctx, cancel := context.WithTimeout(t.Context(), p.Limit)
			defer cancel()
			whole := pods.run(t, podName(t)+"-whole", hostroot.ImageName, p)
			pod := pods.run(t, podName(t), hostroot.ImageName, withArgs(p, "--pause", "0.04"))
			for round := range rounds {
				at := programSteps * (round + 1) / 5
				pods.await(ctx, t, pod, at)
				before := pods.steps(t, pod)
				var archive string
				if err := result.Time("checkpoint", func() (err error) {
					archive, err = n.Checkpoint(ctx, pod.Metadata.Name, programContainer, 0)
					return err
				}); err != nil {
					t.Fatalf("%v\n%s", err, n.LogTail(4000))
				}
				if err := n.DeleteStatic(ctx, strings.TrimSuffix(pod.Metadata.Name, "-"+node.Name)); err != nil {
					t.Fatal(err)
				}
				name, ref := fmt.Sprintf("%s-%d", podName(t), round+1), programImage(podName(t), round+1)
				if _, err := n.Output(ctx, "gpuckpt", "image", "build", "kubernetes-archive:"+archive, ref, "--address", n.Address(), "--namespace", node.Namespace, "--quiet"); err != nil {
					t.Fatal(err)
				}
				if err := os.Remove(archive); err != nil {
					t.Fatal(err)
				}
				if round > 0 { // the checkpoint and its image needed what the pod was run of
					if err := n.RemoveImage(ctx, programImage(podName(t), round)); err != nil {
						t.Fatal(err)
					}
				}
				if err := result.Time("restore", func() error { pod = pods.run(t, name, ref, p); return nil }); err != nil {
					t.Fatal(err)
				}
				pods.await(ctx, t, pod, len(before)+1)
				if now := pods.steps(t, pod); !slices.Equal(now[:len(before)], before) {
					t.Fatalf("restore %d has other steps than were there at the checkpoint", round+1)
				}
				result.Number("rounds_count", float64(round+1))
			}
			pods.await(ctx, t, pod, programSteps)
			pods.await(ctx, t, whole, programSteps)
			got, want := pods.steps(t, pod), pods.steps(t, whole)
			if !slices.Equal(got, want) {
				t.Errorf("%d steps are not those of a pod that nobody interrupted: the last are %q and %q", len(got), got[len(got)-1], want[len(want)-1])
			}
			result.Number("steps_count", float64(len(got)))
		})
	}
}

// programImage is the image of a pod's restore.
func programImage(pod string, round int) string {
	return fmt.Sprintf("gpuckpt.test/%s-%d:1", pod, round)
}

// withArgs is a program with more arguments.
func withArgs(p programs.Program, args ...string) programs.Program {
	p.Args = append(slices.Clone(p.Args), args...)
	return p
}

// dropDriverMounts takes the driver's libraries out of a node's CDI specification: they come with the
// host's directories, read-only, and may be behind links there.
func dropDriverMounts(t *testing.T, n *node.Node) {
	t.Helper()
	file := filepath.Join(n.Dir(), "cdi", "nvidia.json")
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var spec map[string]any
	if err := json.Unmarshal(data, &spec); err != nil {
		t.Fatal(err)
	}
	delete(spec["containerEdits"].(map[string]any), "mounts")
	if data, err = json.Marshal(spec); err == nil {
		err = os.WriteFile(file, data, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// programContainer is the container's name in such a pod.
const programContainer = "program"

// programPods runs pods of the host's Python.
type programPods struct {
	n       *node.Node
	python  *hostroot.Python
	cuda    bool
	volumes []any
	mounts  []any
}

// stage imports the image, and mounts the host's directories where pods can have them as volumes:
// each alone, because a volume brings the mounts below it along, of which CRIU is not told.
func (p *programPods) stage(t *testing.T) {
	t.Helper()
	root, err := hostroot.New(p.python, gpu)
	if err != nil {
		t.Fatal(err)
	}
	img, err := root.Image(t.Context())
	if err == nil {
		err = p.n.Import(t.Context(), hostroot.ImageName, img)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, m := range root.Mounts {
		name := "host-" + strconv.Itoa(i)
		dir := filepath.Join(p.n.Dir(), name)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := unix.Mount(m.Source, dir, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		})
		p.volumes = append(p.volumes, map[string]any{"name": name, "hostPath": map[string]any{"path": dir}})
		p.mounts = append(p.mounts, map[string]any{"name": name, "mountPath": m.Destination, "readOnly": true})
	}
}

// run runs a program in a static pod, which is deleted when the test ends.
func (p *programPods) run(t *testing.T, name, image string, program programs.Program) node.Pod {
	t.Helper()
	var annotations map[string]string
	if image != hostroot.ImageName {
		annotations = restoring
	}
	var env []any
	for _, variable := range p.python.Env(gpu, p.cuda) {
		key, value, _ := strings.Cut(variable, "=")
		env = append(env, map[string]any{"name": key, "value": value})
	}
	command := []string{p.python.Executable, hostroot.ProgramsDir + "/" + program.File, "--steps", strconv.Itoa(programSteps), "--file", programFile}
	container := map[string]any{
		"name": programContainer, "image": image, "imagePullPolicy": "Never", "env": env, "volumeMounts": p.mounts,
		"command":   append(command, program.Args...),
		"resources": map[string]any{"limits": map[string]any{node.Resource: "1"}},
	}
	manifest, err := json.Marshal(map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{"name": name, "namespace": node.PodNamespace, "annotations": annotations},
		"spec": map[string]any{
			"nodeName": node.Name, "terminationGracePeriodSeconds": 1, "dnsPolicy": "Default", "restartPolicy": "Never",
			"volumes": p.volumes, "containers": []any{container},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		if err := p.n.DeleteStatic(ctx, name); err != nil {
			t.Error(err)
		}
	})
	pod, err := p.n.RunStatic(t.Context(), name, string(manifest))
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, p.n.KubeletLog(3000), p.n.LogTail(3000))
	}
	return pod
}

// steps are the lines that a pod's program has written.
func (p *programPods) steps(t *testing.T, pod node.Pod) []string {
	t.Helper()
	pid, err := p.n.Pid(t.Context(), pod.Container(programContainer))
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", pid, programFile))
	if err != nil {
		return nil // it has not begun, or has ended
	}
	lines := strings.Split(string(data), "\n")
	return lines[:len(lines)-1] // the last one has no end
}

// await waits until a pod's program has that many steps.
func (p *programPods) await(ctx context.Context, t *testing.T, pod node.Pod, want int) {
	t.Helper()
	for len(p.steps(t, pod)) < want {
		select {
		case <-ctx.Done():
			t.Fatalf("%s: %d steps, want %d: %v; it wrote:\n%s\n%s", pod.Metadata.Name, len(p.steps(t, pod)), want, context.Cause(ctx), p.output(t, pod), p.n.LogTail(3000))
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// output is the end of what a pod's program wrote, as the kubelet keeps it.
func (p *programPods) output(t *testing.T, pod node.Pod) string {
	t.Helper()
	logs, err := filepath.Glob(filepath.Join(p.n.Dir(), "kubelet-logs", "pods", "*_"+pod.Metadata.Name+"_*", programContainer, "*.log"))
	if err != nil || len(logs) == 0 {
		return "nothing"
	}
	data, err := os.ReadFile(logs[0])
	if err != nil {
		return err.Error()
	}
	return string(data[max(0, len(data)-3000):])
}
