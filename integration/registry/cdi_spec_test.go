// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"encoding/base64"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// cdiSpec writes a CDI specification of the test's GPU 0, made of what the
// harness gives to containers, and gives its directory.
func cdiSpec(t *testing.T, c *harness.Containerd) string {
	t.Helper()
	spec := &specs.Spec{Linux: &specs.Linux{}, Process: &specs.Process{}}
	for _, opt := range gpu.SpecOpts(0) {
		if err := opt(t.Context(), nil, nil, spec); err != nil {
			t.Fatal(err)
		}
	}
	type object = map[string]any
	var nodes, mounts []object
	for _, d := range spec.Linux.Devices {
		nodes = append(nodes, object{"path": d.Path, "type": d.Type, "major": d.Major, "minor": d.Minor, "permissions": "rwm"})
	}
	for _, m := range spec.Mounts {
		mounts = append(mounts, object{"hostPath": m.Source, "containerPath": m.Destination, "type": m.Type, "options": m.Options})
	}
	for _, variable := range c.HostEnv() {
		if conf, ok := strings.CutPrefix(variable, "SOFTCUDA_CONF="); ok { // as the harness mounts it
			mounts = append(mounts, object{"hostPath": conf, "containerPath": "/etc/softcuda.conf", "type": "bind", "options": []string{"rbind", "ro", "rprivate"}})
		}
	}
	edits := object{"deviceNodes": nodes, "env": spec.Process.Env}
	if len(mounts) > 0 {
		edits["mounts"] = mounts
	}
	data, err := json.Marshal(object{
		"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu",
		"devices": []object{{"name": "0", "containerEdits": edits}},
	})
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "nvidia.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

// adopt is a container that gpuckpt has made.
func adopt(t *testing.T, c *harness.Containerd, id string, port int) *harness.Container {
	t.Helper()
	k := c.Adopt(id, port)
	k.RemoveAtEnd(t)
	return k
}

// dockerConfig is an environment with credentials as docker login writes them.
func dockerConfig(t *testing.T, host, user, password string) []string {
	t.Helper()
	dir := t.TempDir()
	auth := base64.StdEncoding.EncodeToString([]byte(user + ":" + password))
	data, err := json.Marshal(map[string]any{"auths": map[string]any{host: map[string]string{"auth": auth}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"DOCKER_CONFIG=" + dir}
}
