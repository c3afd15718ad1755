// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/features"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
	"github.com/gpuckpt/gpuckpt/internal/node/host"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
)

// envPods is "all" to have the pods of TestPods on older containerds, too.
const envPods = "GPUCKPT_TEST_PODS"

// Pods as people write them. Each is checkpointed by the kubelet, and ends; what its volumes are made of is
// renewed; and a pod of the same spec is restored, where each row of the table of features is as the table
// says. What is refused is refused before the dump, and the pod runs on.
func TestPods(t *testing.T) {
	versions := []string{""}
	if os.Getenv(envPods) == "all" {
		versions = append(versions, harness.OlderContainerds...)
	}
	for _, version := range versions {
		t.Run("containerd"+version, func(t *testing.T) {
			results.Add(t)
			if version == "" {
				testPods(t, shared(t))
			} else {
				testPods(t, own(t, node.Options{APIServer: true, Bins: older(t, version)}))
			}
		})
	}
}

// podCase is a pod, and what is checked of it.
type podCase struct {
	name  string
	shows []string       // the rows of the table
	pod   map[string]any // more of the pod's spec, and
	main  map[string]any // of that of the container that is checkpointed
	image string         // empty: the server's
	args  []string
	port  int // 0: counterPort

	// check is called for the pod before its checkpoint, and for the one that is restored.
	check func(k *looked)
	// refused is what the checkpoint is refused with; instead makes the pod one that is not. It is nil for
	// one that stays so.
	refused string
	instead func(k *looked)
	// ended is called when the restored pod has ended.
	ended func(t *testing.T)

	was   map[string]string // what same has seen
	count int
	ready bool // to be restored
}

// podsTest is one run of all.
type podsTest struct {
	n   *node.Node
	dir string // on the node, for hostPath
}

// The image of the server, and the objects that pods have as volumes.
const (
	serverImage = "gpuckpt.test/pod-server:latest"
	podObjects  = `
{apiVersion: v1, kind: ConfigMap, metadata: {name: pods}, data: {key: %[1]s}}
---
{apiVersion: v1, kind: Secret, metadata: {name: pods}, stringData: {key: %[1]s}}
`
)

func testPods(t *testing.T, n *node.Node) {
	p := &podsTest{n, filepath.Join(n.Dir(), "pod-volumes")}
	p.importServer(t)
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	p.renew(t, "old")
	cases := p.cases(t)
	for _, f := range features.All {
		if !slices.ContainsFunc(cases, func(c *podCase) bool { return slices.Contains(c.shows, f.Pod) }) {
			t.Errorf("no pod has %s", f.Pod)
		}
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
		defer cancel()
		for _, args := range [][]string{{"delete", "pod", "--selector", "test=pods", "--timeout=110s"}, {"delete", "configmap,secret", "pods"}} {
			if _, err := n.Kubectl(ctx, args...); err != nil {
				t.Error(err)
			}
		}
	})
	p.make(t, cases, false)
	for _, c := range cases {
		t.Run(c.name+" checkpointed", func(t *testing.T) { p.checkpoint(t, c) })
	}
	p.renew(t, "new")
	p.kubectl(t, "delete", "pod", "--selector", "test=pods", "--timeout=110s")
	cases = slices.DeleteFunc(cases, func(c *podCase) bool { return !c.ready })
	p.make(t, cases, true)
	for _, c := range cases {
		t.Run(c.name+" restored", func(t *testing.T) {
			k := p.look(t, c, true)
			k.asks("count", strconv.Itoa(c.count+1))
			c.check(k)
			if c.ended != nil {
				p.kubectl(t, "delete", "pod", c.podName(true), "--timeout=180s")
				c.ended(t)
			}
		})
	}
}

func (p *podsTest) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := p.n.Kubectl(t.Context(), args...)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, p.n.KubeletLog(2000), p.n.LogTail(2000))
	}
	return out
}

// importServer imports the server's image, with a distribution's links, users and libraries.
func (p *podsTest) importServer(t *testing.T) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	gpuwork, err := bins.Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	image, err := harness.BuildImage(t.Context(), harness.ImageSpec{
		Files:      map[string]string{"/usr/bin/server": self, "/usr/bin/gpuwork": gpuwork},
		Entrypoint: []string{"server"}, Env: []string{envServes + "=1"},
	})
	if err == nil {
		err = p.n.Import(t.Context(), serverImage, image)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// renew changes the content of the objects.
func (p *podsTest) renew(t *testing.T, content string) {
	t.Helper()
	if err := p.n.Apply(t.Context(), fmt.Sprintf(podObjects, content)); err != nil {
		t.Fatal(err)
	}
}

func (c *podCase) podName(restored bool) string {
	if restored {
		return "pods-" + c.name + "-restored"
	}
	return "pods-" + c.name
}

// make has the API server run pods of all cases.
func (p *podsTest) make(t *testing.T, cases []*podCase, restored bool) {
	t.Helper()
	var b bytes.Buffer
	for _, c := range cases {
		main := map[string]any{"name": "main", "image": c.image, "imagePullPolicy": "Never", "args": c.args}
		if c.image == "" { // a question before the server listens is lost when the kernel has refused some
			main["image"] = serverImage
			main["readinessProbe"] = object{"periodSeconds": 1, "timeoutSeconds": 30, "httpGet": object{"port": cmp.Or(c.port, counterPort) + 1, "path": "/healthz"}}
		}
		meta := map[string]any{"name": c.podName(restored), "labels": map[string]string{"test": "pods"}}
		if restored {
			main["image"] = programImage(c.podName(true), 1)
			meta["annotations"] = restoring
		}
		maps.Copy(main, c.main)
		spec := map[string]any{"nodeName": node.Name, "terminationGracePeriodSeconds": 1, "dnsPolicy": "Default", "containers": []any{main}}
		maps.Copy(spec, c.pod)
		data, err := json.Marshal(map[string]any{"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s\n---\n", data)
	}
	if err := p.n.Apply(t.Context(), b.String()); err != nil {
		t.Fatal(err)
	}
}

// checkpoint checks a pod, has it checkpointed, and makes an image of that.
func (p *podsTest) checkpoint(t *testing.T, c *podCase) {
	k := p.look(t, c, false)
	k.counts()
	c.check(k)
	if c.refused != "" {
		_, err := p.n.Checkpoint(t.Context(), c.podName(false), "main", 0)
		isStatus(t, err, http.StatusInternalServerError, c.refused)
		k.counts()
		if c.instead == nil {
			return
		}
		c.instead(k)
	}
	archive, err := betweenProbes(t, p.n, k.pod, "main")
	if err != nil {
		t.Fatalf("%v\n%s", err, p.n.LogTail(3000))
	}
	at := c.count
	k.counts()
	c.count = at // of the checkpoint
	if _, err := p.n.Output(t.Context(), "gpuckpt", "image", "build", "kubernetes-archive:"+archive, programImage(c.podName(true), 1), "--address", p.n.Address(), "--namespace", node.Namespace, "--quiet"); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(archive); err != nil {
		t.Fatal(err)
	}
	c.ready = true
}

// looked is a pod that is looked at.
type looked struct {
	*testing.T
	*podsTest
	c        *podCase
	pod      node.Pod
	pid      int // of the first process of main
	restored bool
}

// look waits until a pod is ready.
func (p *podsTest) look(t *testing.T, c *podCase, restored bool) *looked {
	t.Helper()
	pod, err := p.n.WaitReady(t.Context(), c.podName(restored))
	for try := 1; err != nil && try < 5; try++ { // all start at once
		pod, err = p.n.WaitReady(t.Context(), c.podName(restored))
	}
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, p.n.KubeletLog(2000), p.n.LogTail(4000))
	}
	return &looked{t, p, c, pod, pidOf(t, p.n, pod.Container("main")), restored}
}

// ask asks the pod's program.
func (k *looked) ask(question string) string {
	k.Helper()
	port := counterPort
	if k.c.port != 0 {
		port = k.c.port
	}
	answer, err := harness.Ask(k.Context(), net.JoinHostPort(k.pod.Status.PodIP, strconv.Itoa(port)), question)
	if err != nil {
		said, _ := k.n.Kubectl(k.Context(), "logs", k.pod.Metadata.Name)
		k.Fatalf("%v\nit wrote: %s", err, said)
	}
	return answer
}

// asks fails the test unless the program answers so.
func (k *looked) asks(question, want string) {
	k.Helper()
	if got := k.ask(question); got != want {
		k.Errorf("%s: %q is answered by %q, want %q", k.pod.Metadata.Name, question, got, want)
	}
}

// has fails the test unless an answer has that in it.
func (k *looked) has(question, want string) {
	k.Helper()
	if got := k.ask(question); !strings.Contains(got, want) {
		k.Errorf("%s: %q is answered by %q, want %q in it", k.pod.Metadata.Name, question, got, want)
	}
}

// counts has the program count.
func (k *looked) counts() {
	k.Helper()
	if k.c.count++; k.c.count == 1 {
		k.c.count = 101
	}
	k.asks("count", strconv.Itoa(k.c.count))
}

// same fails the test if the restored pod has something else than the first one had.
func (k *looked) same(what, have string) {
	k.Helper()
	if !k.restored {
		k.c.was[what] = have
		k.Logf("%s: %s", what, have)
	} else if was := k.c.was[what]; have != was {
		k.Errorf("%s: %q, and it was %q", what, have, was)
	}
}

// status returns fields of /proc/PID/status.
func (k *looked) status(fields ...string) string {
	k.Helper()
	status, err := proc.StatusOf(k.pid)
	if err != nil {
		k.Fatal(err)
	}
	var words []string
	for _, name := range fields {
		words = append(words, name+"="+strings.Join(strings.Fields(status.Field(name)), ","))
	}
	return strings.Join(words, " ")
}

// rights compares what the first process may do, and has that in it.
func (k *looked) rights(want ...string) {
	k.Helper()
	have := k.status("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
	k.same("rights", have)
	for _, w := range want {
		if !strings.Contains(have, w) {
			k.Errorf("%s has %s, want %s", k.pod.Metadata.Name, have, w)
		}
	}
}

// namespace returns a namespace of a process.
func (k *looked) namespace(pid, kind string) string {
	k.Helper()
	link, err := os.Readlink("/proc/" + pid + "/ns/" + kind)
	if err != nil {
		k.Fatal(err)
	}
	return link
}

// mounted returns the options of the mount at a place, with those of propagation.
func (k *looked) mounted(place string) string {
	k.Helper()
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", k.pid))
	if err != nil {
		k.Fatal(err)
	}
	defer f.Close()
	all, err := mountinfo.GetMountsFromReader(f, mountinfo.SingleEntryFilter(place))
	if err != nil || len(all) != 1 {
		k.Fatalf("%d mounts at %s, %v", len(all), place, err)
	}
	return all[0].Options + " " + all[0].Optional
}

// limited compares a limit of the container's cgroup, or of the pod's, by its files of both versions.
func (k *looked) limited(above, controller, file1, want1, file2, want2 string) {
	k.Helper()
	root, name, want := filepath.Join("/sys/fs/cgroup", controller), file1, want1
	if harness.CgroupVersion() == 2 {
		root, name, want, controller = "/sys/fs/cgroup", file2, want2, ""
	}
	at, err := host.CgroupPath(k.pid, controller)
	if err != nil {
		k.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(root, at, above, name))
	if err != nil || strings.TrimSpace(string(text)) != want {
		k.Errorf("%s of %s is %q, %v; want %s", name, filepath.Join(at, above), text, err, want)
	}
}

// betweenProbes checkpoints a container, and tries again while a probe's program is in it.
func betweenProbes(t *testing.T, n *node.Node, pod node.Pod, container string) (archive string, err error) {
	t.Helper()
	for range 10 {
		archive, err = n.Checkpoint(t.Context(), pod.Metadata.Name, container, 0)
		if err == nil || !strings.Contains(err.Error(), "exec'd") {
			return archive, err
		}
		time.Sleep(100 * time.Millisecond)
	}
	return archive, err
}

// list is a JSON list.
func list(items ...any) []any { return items }

type object = map[string]any

// volume is a volume of a pod.
func volume(name, kind string, of object) object { return object{"name": name, kind: of} }

// mount is where a container has one; more are pairs.
func mount(name, place string, more ...any) object {
	m := object{"name": name, "mountPath": place}
	for i := 0; i < len(more); i += 2 {
		m[more[i].(string)] = more[i+1]
	}
	return m
}

// sharedDir makes a directory of the node whose mounts go to containers, and come from them.
func (p *podsTest) sharedDir(t *testing.T, name string) string {
	t.Helper()
	dir := filepath.Join(p.dir, name)
	err := os.MkdirAll(filepath.Join(dir, "m"), 0o755)
	if err == nil {
		err = unix.Mount(dir, dir, "", unix.MS_BIND, "")
	}
	if err == nil {
		err = unix.Mount("", dir, "", unix.MS_SHARED, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// mountIn mounts a file system with a file in a directory, as a CSI driver may below a volume.
func mountIn(t *testing.T, dir string) {
	t.Helper()
	err := unix.Mount("later", filepath.Join(dir, "m"), "tmpfs", 0, "size=64k")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "m", "file"), []byte("below"), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// restricted is the security context of a pod that may do little, and of its container.
func restricted() (pod, container object) {
	pod = object{
		"runAsNonRoot": true, "runAsUser": 1000, "runAsGroup": 1500, "fsGroup": 2000, "supplementalGroups": list(3000),
		"seccompProfile": object{"type": "RuntimeDefault"},
		"sysctls":        list(object{"name": "net.ipv4.ip_unprivileged_port_start", "value": "1000"}, object{"name": "kernel.shm_rmid_forced", "value": "1"}),
	}
	if text, err := os.ReadFile("/sys/module/apparmor/parameters/enabled"); err == nil && strings.TrimSpace(string(text)) == "Y" {
		pod["appArmorProfile"] = object{"type": "RuntimeDefault"}
	}
	return pod, object{"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": object{"drop": list("ALL")}}
}

// isRestricted checks that it may do little.
func (k *looked) isRestricted() {
	k.Helper()
	k.rights("Uid=1000,1000,1000,1000 Gid=1500,1500,1500,1500", "CapPrm=0000000000000000", "CapBnd=0000000000000000", "NoNewPrivs=1", "Seccomp=2")
	groups := strings.Split(strings.TrimPrefix(k.status("Groups"), "Groups="), ",")
	for _, want := range []string{"2000", "3000", "4000"} { // the last is the image's
		if !slices.Contains(groups, want) {
			k.Errorf("its groups are %s, without %s", groups, want)
		}
	}
	label, err := os.ReadFile(fmt.Sprintf("/proc/%d/attr/current", k.pid))
	k.same("LSM", fmt.Sprintf("%q, %v", label, errors.Is(err, unix.EINVAL)))
	if options := k.mounted("/"); !strings.HasPrefix(options, "ro") {
		k.Errorf("its root has the options %s", options)
	}
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/root/data", k.pid), &st); err != nil || st.Gid != 2000 || st.Mode&unix.S_ISGID == 0 {
		k.Errorf("/data is group %d's, mode %#o, %v", st.Gid, st.Mode, err)
	}
	k.limited("", "memory", "memory.limit_in_bytes", "536870912", "memory.max", "536870912")
	k.limited("..", "memory", "memory.limit_in_bytes", "1073741824", "memory.max", "1073741824")
	k.limited("", "cpu", "cpu.cfs_quota_us", "50000", "cpu.max", "50000 100000")
}

// cases are the pods.
func (p *podsTest) cases(t *testing.T) []*podCase {
	t.Helper()
	cases := []*podCase{p.volumes(t), p.restricted(false), p.together(), p.hosts(t), p.privileged(), p.later(t), p.below(t), p.terminal(), p.users(), p.debugged()}
	if gpu.Kind != "" {
		cases = append(cases, p.restricted(true))
	}
	if free, err := os.ReadFile("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages"); err == nil {
		if n, _ := strconv.Atoi(strings.TrimSpace(string(free))); n >= 4 {
			cases = append(cases, p.hugePages())
		}
	}
	for _, c := range cases {
		c.was = make(map[string]string)
	}
	return cases
}

func (p *podsTest) volumes(t *testing.T) *podCase {
	t.Helper()
	dir := filepath.Join(p.dir, "volumes")
	err := os.MkdirAll(dir, 0o755)
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "file"), []byte("of the node"), 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
	named, config, secret := object{"fieldRef": object{"fieldPath": "metadata.name"}}, object{"name": "pods"}, object{"secretName": "pods"}
	return &podCase{
		name:  "volumes",
		shows: []string{features.Token, features.Content, features.Environment, features.EmptyDir, features.Node, features.ReadOnly, features.Names},
		args:  []string{"--watch", "/etc/config,/etc/secret,/etc/config/key", "--open", "/etc/config/key,/etc/secret/key,/host/file"},
		pod: object{
			"hostAliases": list(object{"ip": "10.1.2.3", "hostnames": list("alias.test")}),
			"dnsPolicy":   "None", "dnsConfig": object{"nameservers": list("10.9.8.7"), "searches": list("pods.test")},
			"volumes": list(
				volume("config", "configMap", config), volume("secret", "secret", secret),
				volume("projected", "projected", object{"sources": list(
					object{"configMap": object{"name": "pods", "items": list(object{"key": "key", "path": "config"})}},
					object{"serviceAccountToken": object{"path": "token", "audience": "pods.test", "expirationSeconds": 600}},
				)}),
				volume("labels", "downwardAPI", object{"items": list(object{"path": "name", "fieldRef": named["fieldRef"]})}),
				volume("memory", "emptyDir", object{"medium": "Memory"}), volume("disk", "emptyDir", object{}),
				volume("host", "hostPath", object{"path": dir}), volume("image", "image", object{"reference": serverImage, "pullPolicy": "Never"}),
			),
		},
		main: object{
			"env": list(
				object{"name": "CONTENT", "valueFrom": object{"configMapKeyRef": object{"name": "pods", "key": "key"}}},
				object{"name": "POD_NAME", "valueFrom": named},
			),
			"volumeMounts": list(
				mount("config", "/etc/config"), mount("secret", "/etc/secret"), mount("projected", "/projected"), mount("labels", "/labels"),
				mount("config", "/etc/app/config", "subPath", "key"), mount("secret", "/var/run/app/secret", "subPath", "key"),
				mount("memory", "/memory"), mount("disk", "/disk", "subPath", "sub"), mount("host", "/host"), mount("host", "/mine", "subPathExpr", "$(POD_NAME)"),
				mount("host", "/read-only", "readOnly", true), mount("host", "/recursively", "readOnly", true, "recursiveReadOnly", "Enabled"),
				mount("image", "/image"),
			),
		},
		check: func(k *looked) {
			content, name := "old", k.pod.Metadata.Name
			if k.restored {
				content = "new"
			}
			for _, file := range []string{"/etc/config/key", "/etc/secret/key", "/projected/config", "/etc/app/config", "/run/app/secret"} {
				k.asks("read "+file, content)
			}
			k.asks("kept /etc/config/key", content)
			k.asks("kept /etc/secret/key", content)
			k.asks("kept /host/file", "of the node")
			k.asks("env CONTENT", "old")
			k.asks("read /labels/name", name)
			for _, token := range []string{"/var/run/secrets/kubernetes.io/serviceaccount/token", "/projected/token"} {
				if said := string(claims(k.T, k.ask("read "+token))); !strings.Contains(said, `"name":"`+name+`"`) {
					k.Errorf("%s says %s", token, said)
				}
			}
			for _, file := range []string{"/memory/file", "/disk/file"} {
				k.has("read "+file, "no such file")
				k.asks("write "+file+" x", "")
				k.asks("read "+file, "x")
			}
			k.asks("write /mine/me "+name, "")
			if text, err := os.ReadFile(filepath.Join(dir, name, "me")); err != nil || string(text) != name {
				k.Errorf("by subPathExpr it wrote %q, %v", text, err)
			}
			k.has("write /read-only/file x", "read-only file system")
			k.has("write /recursively/file x", "read-only file system")
			k.asks("read /image/etc/hosts", "127.0.0.1 localhost")
			k.has("read /etc/hosts", "alias.test")
			k.has("read /etc/resolv.conf", "10.9.8.7")
			if !k.restored {
				return
			}
			before := k.ask("events")
			k.renew(k.T, "newer")
			within(k.T, "the change arrives", func() bool {
				return k.ask("read /etc/config/key") == "newer" && k.ask("read /etc/secret/key") == "newer" && k.ask("events") != before
			})
		},
	}
}

func (p *podsTest) restricted(gpu bool) *podCase {
	pod, container := restricted()
	c := &podCase{
		name:  "restricted",
		shows: []string{features.ReadOnly, features.Users, features.Privileges, features.Seccomp, features.Resources, features.Sysctls},
		pod: object{
			"securityContext": pod, "volumes": list(volume("data", "emptyDir", object{})),
			"resources": object{"limits": object{"cpu": "1", "memory": "1Gi"}},
		},
		main: object{"securityContext": container, "volumeMounts": list(mount("data", "/data"))},
	}
	limits := object{"cpu": "500m", "memory": "512Mi"}
	c.main["resources"] = object{"limits": limits, "requests": object{"cpu": "100m", "memory": "64Mi"}}
	if gpu {
		c.name, c.image, c.args = "gpu", harness.WorkloadImage, []string{"counter", "--port", strconv.Itoa(counterPort)}
		limits[node.Resource] = "1"
		c.check = func(k *looked) { k.isRestricted() }
		return c
	}
	c.port, c.args = 1001, []string{"--port", "1001"} // the pod may have it, by its sysctl
	c.check = func(k *looked) {
		k.isRestricted()
		k.asks("write /data/file x", "")
		k.has("write /file x", "read-only file system")
		k.asks("read /proc/sys/net/ipv4/ip_unprivileged_port_start", "1000")
		k.asks("read /proc/sys/kernel/shm_rmid_forced", "1")
	}
	return c
}

func (p *podsTest) together() *podCase {
	const besidePort = 6000
	stopped := filepath.Join(p.dir, "together", "stopped")
	work := list(mount("work", "/scratch"), mount("host", "/host"))
	writes := func(file string) object {
		return object{"exec": object{"command": list("server", "--write", file+"=ran")}}
	}
	return &podCase{
		name:  "together",
		shows: []string{features.InitContainer, features.Probes, features.SharedPIDs, features.Privileges},
		pod: object{
			"shareProcessNamespace": true, "terminationGracePeriodSeconds": 30,
			"volumes": list(volume("work", "emptyDir", object{}), volume("host", "hostPath", object{"path": filepath.Dir(stopped), "type": "DirectoryOrCreate"})),
			"initContainers": list(
				object{"name": "init", "image": serverImage, "imagePullPolicy": "Never", "args": list("--write", "/scratch/init=ran"), "volumeMounts": work},
				object{"name": "beside", "image": serverImage, "imagePullPolicy": "Never", "restartPolicy": "Always", "command": list("gpuwork", "plain", "--port", strconv.Itoa(besidePort))},
			),
		},
		main: object{
			"volumeMounts":    work,
			"securityContext": object{"capabilities": object{"add": list("SYS_PTRACE", "NET_ADMIN"), "drop": list("MKNOD")}},
			"lifecycle":       object{"postStart": writes("/scratch/started"), "preStop": writes("/host/stopped")},
			"startupProbe":    object{"periodSeconds": 1, "timeoutSeconds": 30, "failureThreshold": 100, "tcpSocket": object{"port": httpPort}},
			"readinessProbe":  object{"periodSeconds": 1, "timeoutSeconds": 30, "httpGet": object{"port": httpPort, "path": "/healthz"}},
			"livenessProbe":   object{"periodSeconds": 1, "timeoutSeconds": 30, "grpc": object{"port": grpcPort}},
		},
		check: func(k *looked) {
			k.asks("read /scratch/init", "ran")
			k.asks("read /scratch/started", "ran")
			k.rights("NoNewPrivs=0")
			if answer := ask(k.T, k.pod, besidePort, "count"); answer != "101" {
				k.Errorf("the sidecar answers %s", answer)
			}
			namespace := k.namespace(strconv.Itoa(k.pid), "pid")
			pod, err := k.n.Client().LoadContainer(k.Context(), k.pod.Container("main"))
			if err != nil {
				k.Fatal(err)
			}
			info, err := pod.Info(k.Context())
			if err != nil {
				k.Fatal(err)
			}
			if pause := k.namespace(strconv.Itoa(pidOf(k.T, k.n, info.SandboxID)), "pid"); namespace != pause {
				k.Errorf("its process ids are those of %s, and the pod's of %s", namespace, pause)
			}
			if err := os.Remove(stopped); err != nil && k.restored { // the first one's
				k.Error(err)
			}
			k.Cleanup(func() { // the probes go on
				if now, err := k.n.Pod(context.Background(), k.pod.Metadata.Name); err == nil && now.Status.ContainerStatuses[0].RestartCount > 0 {
					k.Errorf("the kubelet has restarted it")
				}
			})
		},
		ended: func(t *testing.T) {
			if _, err := os.Stat(stopped); err != nil {
				t.Errorf("its preStop hook did not run: %v", err)
			}
		},
	}
}

func (p *podsTest) hosts(t *testing.T) *podCase {
	t.Helper()
	port, err := harness.FreePorts(3)
	if err == nil { // what else runs on this machine mounts below its own
		err = unix.Mount("node", "/dev/shm", "tmpfs", 0, "mode=1777")
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount("/dev/shm", unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return &podCase{
		name: "host", shows: []string{features.HostsOwn}, port: port, args: []string{"--port", strconv.Itoa(port)},
		pod: object{"hostNetwork": true, "hostPID": true, "hostIPC": true},
		check: func(k *looked) {
			for _, kind := range []string{"net", "pid", "ipc"} {
				if have, host := k.namespace(strconv.Itoa(k.pid), kind), k.namespace("self", kind); have != host {
					k.Errorf("its %s namespace is %s, and the host's %s", kind, have, host)
				}
			}
		},
	}
}

func (p *podsTest) privileged() *podCase {
	return &podCase{
		name: "privileged", shows: []string{features.Privileges}, main: object{"securityContext": object{"privileged": true}},
		check: func(k *looked) { k.rights("Seccomp=2") }, // configuration.md, io_uring
	}
}

func (p *podsTest) later(t *testing.T) *podCase {
	t.Helper()
	dir := p.sharedDir(t, "later")
	return &podCase{
		name: "later", shows: []string{features.Propagation, features.Below},
		pod:  object{"volumes": list(volume("host", "hostPath", object{"path": dir}))},
		main: object{"volumeMounts": list(mount("host", "/var/lib/data", "mountPropagation", "HostToContainer"))},
		check: func(k *looked) {
			if options := k.mounted("/var/lib/data"); !strings.Contains(options, "master:") || strings.Contains(options, "shared:") {
				k.Errorf("the volume is mounted with %s", options)
			}
			mountIn(k.T, dir)
			k.asks("read /var/lib/data/m/file", "below")
			if k.restored {
				if err := unix.Unmount(filepath.Join(dir, "m"), 0); err != nil {
					k.Error(err)
				}
				k.has("read /var/lib/data/m/file", "no such file")
			}
		},
		refused: "it came with the mount /var/lib/data",
		instead: func(k *looked) {
			if err := unix.Unmount(filepath.Join(dir, "m"), 0); err != nil {
				k.Fatal(err)
			}
		},
	}
}

// below has a volume where something came with another.
func (p *podsTest) below(t *testing.T) *podCase {
	t.Helper()
	dir := p.sharedDir(t, "below")
	mountIn(t, dir)
	return &podCase{
		name: "below", shows: []string{features.Below},
		pod: object{"volumes": list(
			volume("host", "hostPath", object{"path": dir}), volume("in", "hostPath", object{"path": filepath.Join(dir, "m")}),
		)},
		main:    object{"volumeMounts": list(mount("host", "/var/lib/data"), mount("in", "/var/lib/data/m"))},
		check:   func(k *looked) { k.asks("read /var/lib/data/m/file", "below") },
		refused: "something came with the mount /var/lib/data there",
	}
}

func (p *podsTest) terminal() *podCase {
	return &podCase{
		name: "terminal", shows: []string{features.Terminal}, main: object{"tty": true, "stdin": true},
		check: func(k *looked) {
			for _, fd := range []string{"0", "1", "2"} {
				link, err := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", k.pid, fd))
				if err != nil || !strings.HasPrefix(link, "/dev/pts/") {
					k.Errorf("its file %s is %s, %v", fd, link, err)
				}
			}
			k.asks("say here is "+k.pod.Metadata.Name, "")
			within(k.T, "its log has what it says", func() bool {
				return strings.Contains(k.kubectl(k.T, "logs", k.pod.Metadata.Name), "here is "+k.pod.Metadata.Name)
			})
		},
	}
}

func (p *podsTest) users() *podCase {
	return &podCase{
		name: "users", shows: []string{features.UserNamespace}, pod: object{"hostUsers": false},
		main: object{"securityContext": object{"procMount": "Unmasked"}},
		check: func(k *looked) {
			if strings.Contains(k.status("Uid"), "=0,") {
				k.Errorf("it has the host's users: %s", k.status("Uid"))
			}
		},
		refused: "hostUsers: false",
	}
}

// debugged has a container that somebody has put into it, in the first pod.
func (p *podsTest) debugged() *podCase {
	return &podCase{
		name: "debugged", shows: []string{features.Debug, features.Probes},
		main: object{"livenessProbe": object{"periodSeconds": 1, "timeoutSeconds": 30, "exec": object{"command": list("gpuwork", "exit", "0")}}},
		check: func(k *looked) {
			const state = "jsonpath={.status.ephemeralContainerStatuses[*].state.running}"
			if k.restored {
				if has := k.kubectl(k.T, "get", "pod", k.pod.Metadata.Name, "--output", state); has != "" {
					k.Errorf("the restored pod has %s", has)
				}
				return
			}
			k.kubectl(k.T, "debug", k.pod.Metadata.Name, "--image", serverImage, "--image-pull-policy=Never", "--target=main", "--container=debugger", "--", "gpuwork", "sleep")
			within(k.T, "the debugger runs", func() bool {
				return k.kubectl(k.T, "get", "pod", k.pod.Metadata.Name, "--output", state) != ""
			})
		},
	}
}

// hugePages has some, where the machine has.
func (p *podsTest) hugePages() *podCase {
	const pages = "4Mi"
	return &podCase{
		name: "hugepages", args: []string{"--huge"},
		pod: object{"volumes": list(volume("huge", "emptyDir", object{"medium": "HugePages"}))},
		main: object{
			"volumeMounts": list(mount("huge", "/hugepages")),
			"resources":    object{"limits": object{"hugepages-2Mi": pages, "memory": "256Mi", "cpu": "1"}},
		},
		check: func(k *looked) {
			k.asks("huge", "huge")
			k.limited("", "hugetlb", "hugetlb.2MB.limit_in_bytes", "4194304", "hugetlb.2MB.max", "4194304")
		},
	}
}
