// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// agentOn is a node of a cluster that has no kubelet, with an agent's pod.
const agentOn = `
{apiVersion: v1, kind: Node, metadata: {name: %[1]s}}
---
{apiVersion: v1, kind: Pod, metadata: {name: agent-%[1]s, namespace: gpuckpt}, spec: {nodeName: %[1]s, serviceAccountName: gpuckpt-agent, containers: [{name: agent, image: agent}]}}
`

// What whoever has stolen the token of a node's agent can read and write, asked of an API server with
// deploy/agent: all rights that the server names, and what the policies leave of them.
func TestStolenToken(t *testing.T) {
	results.Add(t)
	n := own(t, node.Options{APIServer: true})
	kubectl := func(args ...string) string {
		t.Helper()
		out, err := n.Kubectl(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	kubectl("create", "namespace", "gpuckpt")
	kubectl("apply", "-k", filepath.Join(sourceDir(t), "deploy", "agent"))
	kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=180s")
	for _, name := range []string{"mine", "theirs"} {
		if err := n.Apply(t.Context(), fmt.Sprintf(agentOn, name)); err != nil {
			t.Fatal(err)
		}
	}
	kubectl("create", "namespace", "victim")
	kubectl("create", "secret", "generic", "password", "--namespace", "victim", "--from-literal=password=x")
	token := strings.TrimSpace(kubectl("create", "token", "gpuckpt-agent", "--namespace", "gpuckpt", "--bound-object-kind=Pod", "--bound-object-name=agent-mine"))
	unbound := strings.TrimSpace(kubectl("create", "token", "gpuckpt-agent", "--namespace", "gpuckpt"))

	// All that the API server lets the account ask, of whatever object.
	var rights []string
	out, err := n.KubectlAs(t.Context(), token, "auth", "can-i", "--list", "--no-headers", "--namespace", "victim")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); !strings.HasPrefix(f[0], "[") && !strings.HasPrefix(f[0], "self") {
			rights = append(rights, f[0]+" "+line[strings.LastIndex(line, "["):len(line)-1])
		}
	}
	slices.Sort(rights)
	want := []string{
		"checkpoints.gpuckpt.dev [get list watch]", "checkpoints.gpuckpt.dev/status [update]",
		"events [create patch]", "nodekeys.gpuckpt.dev [get list watch create update]", "pods [get list]",
	}
	if !slices.Equal(rights, want) {
		t.Errorf("the rights are\n%s\nwant\n%s", strings.Join(rights, "\n"), strings.Join(want, "\n"))
	}

	// What the policies leave of them.
	kubectl("annotate", "namespace", "victim", "gpuckpt.dev/repositories=r.test/team, other.test")
	checkpoint := func(name, nodeName, phase string) {
		t.Helper()
		if err := n.Apply(t.Context(), fmt.Sprintf("{apiVersion: gpuckpt.dev/v1alpha1, kind: Checkpoint, metadata: {namespace: victim, name: %s}, spec: {pod: job, repository: r.test/team/job}}", name)); err != nil {
			t.Fatal(err)
		}
		if nodeName != "" {
			kubectl("patch", "--namespace", "victim", "checkpoint", name, "--subresource=status", "--type=merge", "--patch", fmt.Sprintf(`{"status":{"node":%q,"podUID":"1"%s}}`, nodeName, phase))
		}
	}
	checkpoint("mine", "mine", "")
	checkpoint("unbound", "mine", "")
	checkpoint("moved", "mine", "")
	checkpoint("other-pod", "mine", "")
	checkpoint("other-template", "mine", "")
	checkpoint("over", "mine", `,"phase":"Succeeded"`)
	checkpoint("theirs", "theirs", "")
	checkpoint("theirs-running", "theirs", `,"phase":"Running"`)
	checkpoint("nobodys", "", "")
	key := func(name string) []string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "key.json")
		text := fmt.Sprintf(`{"apiVersion": "gpuckpt.dev/v1alpha1", "kind": "NodeKey", "metadata": {"name": %q}, "spec": {"keys": ["-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"]}}`, name)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{"apply", "--server-side", "-f", file}
	}
	kubectl(key("there")...)
	// replace changes the status of a Checkpoint, as the agent does.
	replace := func(name, change string) []string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "object.yaml")
		text := kubectl("get", "--namespace", "victim", "checkpoint", name, "--output", "json")
		text = strings.TrimSpace(text)
		if strings.Contains(text, `"status": {`) {
			text = strings.Replace(text, `"status": {`, `"status": {`+change, 1)
		} else {
			text = strings.TrimSuffix(text, "}") + `, "status": {` + strings.TrimSuffix(change, ",") + "}}"
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return []string{"replace", "--subresource=status", "-f", file}
	}
	const forged = `"containers": [{"name": "a", "image": "evil.test/a:1", "digest": "sha256:0"}],`
	const byPolicy, byRole = "ValidatingAdmissionPolicy", "cannot"
	for _, c := range []struct {
		what    string
		token   string
		args    []string
		refused string
	}{
		{"read a secret", token, []string{"get", "secret", "password", "--namespace", "victim"}, byRole},
		{"read a pod", token, []string{"get", "pod", "agent-theirs", "--namespace", "gpuckpt"}, ""},
		{"delete a pod", token, []string{"delete", "pod", "agent-theirs", "--namespace", "gpuckpt", "--wait=false"}, byRole},
		{"make a pod", token, []string{"run", "evil", "--image=evil", "--namespace", "victim"}, byRole},
		{"make a token", token, []string{"create", "token", "gpuckpt-controller", "--namespace", "gpuckpt"}, byRole},
		{"read Checkpoints", token, []string{"get", "checkpoints", "--all-namespaces"}, ""},
		{"make a Checkpoint", token, []string{"create", "-f", replace("mine", "")[3]}, byRole},
		{"write the status of its node's", token, replace("mine", `"phase": "Running",`), ""},
		{"write it with a token of no node", unbound, replace("unbound", forged), byPolicy},
		{"give its node's to another", token, changed(t, replace("moved", ""), `"node": "mine"`, `"node": "theirs"`), byPolicy},
		{"give its node's another pod", token, changed(t, replace("other-pod", ""), `"podUID": "1"`, `"podUID": "2"`), byPolicy},
		{"give its node's another template", token, replace("other-template", `"template": "1",`), byPolicy},
		{"write what is over", token, replace("over", forged), byPolicy},
		{"write another node's", token, replace("theirs", forged), byPolicy},
		{"write another node's that runs", token, replace("theirs-running", forged), byPolicy},
		{"write its node's key", token, append([]string{"create"}, key("mine")[2:]...), ""},
		{"write it again", token, append([]string{"replace"}, key("mine")[2:]...), ""},
		{"write it with a token of no node", unbound, append([]string{"create"}, key("unbound")[2:]...), byPolicy},
		{"add a key for another node", token, append([]string{"create"}, key("theirs")[2:]...), byPolicy},
		{"replace the key of another node", token, append([]string{"replace"}, key("there")[2:]...), byPolicy},
		{"delete the key of a node", token, []string{"delete", "nodekey", "there"}, byRole},
		{"take one that has no node", token, replace("nobodys", `"node": "mine", "podUID": "1",`), byPolicy},
	} {
		_, err := n.KubectlAs(t.Context(), c.token, c.args...)
		answer := "yes"
		if err != nil {
			_, why, _ := strings.Cut(err.Error(), "exit status 1: ")
			answer = "no: " + why
		}
		t.Logf("%-35s %s", c.what, strings.TrimSpace(answer))
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s: %v, want %q", c.what, err, c.refused)
		}
	}

	// Who may write a key is root on all nodes: the agents alone, by what deploy/agent grants and what
	// namespaces' administrators have.
	for _, who := range []string{"system:serviceaccount:gpuckpt:gpuckpt-controller", "system:node:mine", "somebody"} {
		for _, verb := range []string{"create", "update", "patch"} {
			if out, err := n.Kubectl(t.Context(), "auth", "can-i", verb, "nodekeys.gpuckpt.dev", "--as="+who, "--as-group=system:authenticated"); err == nil {
				t.Errorf("%s may %s keys: %s", who, verb, out)
			}
		}
	}
	var roles struct {
		Items []struct {
			Metadata struct{ Name string }
			Rules    []struct{ APIGroups, Resources, Verbs []string }
		}
	}
	if err := json.Unmarshal([]byte(kubectl("get", "clusterroles", "--output", "json")), &roles); err != nil {
		t.Fatal(err)
	}
	var writers []string
	for _, role := range roles.Items {
		for _, rule := range role.Rules {
			any := func(list []string, words ...string) bool {
				return slices.ContainsFunc(list, func(w string) bool { return slices.Contains(append(words, "*"), w) })
			}
			if any(rule.APIGroups, "gpuckpt.dev") && any(rule.Resources, "nodekeys") && any(rule.Verbs, "create", "update", "patch") {
				writers = append(writers, role.Metadata.Name)
			}
		}
	}
	slices.Sort(writers)
	t.Logf("roles that may write keys of nodes: %q", writers)
	// The first and the last are Kubernetes' own, and may write all objects.
	if want := []string{"cluster-admin", "gpuckpt-agent", "system:controller:generic-garbage-collector"}; !slices.Equal(writers, want) {
		t.Errorf("%q may write keys of nodes, want %q", writers, want)
	}

	// Where a namespace may push to.
	for repository, may := range map[string]bool{
		"r.test/team": true, "r.test/team/job": true, "other.test/any": true,
		"r.test/teamwork": false, "r.test/other": false, "r.test": false, "other.test.evil.test/any": false, "localhost/any": false,
	} {
		for kind, spec := range map[string]string{"Checkpoint": "pod: job, ", "Migration": "pod: job, ", "CheckpointSchedule": "schedule: '@hourly', selector: {}, checkpoint: {"} {
			end := map[bool]string{true: "}"}[kind == "CheckpointSchedule"]
			err := n.Apply(t.Context(), fmt.Sprintf("{apiVersion: gpuckpt.dev/v1alpha1, kind: %s, metadata: {namespace: victim, name: %s}, spec: {%s repository: %s%s}}",
				kind, strings.NewReplacer("/", "-", ".", "-").Replace(repository), spec, repository, end))
			said := err != nil && (strings.Contains(err.Error(), "may not push to "+repository) || strings.Contains(err.Error(), "spec.repository") || strings.Contains(err.Error(), "checkpoint.repository"))
			if (err == nil) != may || err != nil && !said {
				t.Errorf("a %s to %s: %v, may it? %t", kind, repository, err, may)
			}
		}
	}
	if err := n.Apply(t.Context(), "{apiVersion: gpuckpt.dev/v1alpha1, kind: Checkpoint, metadata: {name: unnamed}, spec: {pod: job, repository: r.test/team}}"); err == nil || !strings.Contains(err.Error(), "the annotation gpuckpt.dev/repositories of the namespace") {
		t.Errorf("a namespace whose administrator has said nothing: %v", err)
	}
}

// changed changes the text of the file of a command.
func changed(t *testing.T, args []string, from, to string) []string {
	t.Helper()
	file := args[len(args)-1]
	if err := os.WriteFile(file, []byte(strings.Replace(read(t, file), from, to, 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	return args
}
