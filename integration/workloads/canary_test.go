// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The canary of docs/compatibility.md, without curl: a request has the answer after a restore that it had before the
// checkpoint, or the restore fails and ends the container. What changes the answer is a volume here.
func TestCanary(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	answer, url := filepath.Join(t.TempDir(), "answer"), fmt.Sprintf("http://127.0.0.1:%d/answer", port)
	says := func(text string) {
		if err := os.WriteFile(answer, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	says("42")
	curl := host.Executable + ` -c 'import urllib.request as r; print(r.urlopen("` + url + `").read())'`
	hook := func(script string) string {
		text, err := json.Marshal([]string{"/bin/sh", "-c", script})
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	spec := harness.RunSpec{ID: harness.Name(t), Port: port, Annotations: map[string]string{
		"dev.gpuckpt.hook.before-checkpoint":        hook(curl + " >/run/canary"),
		"dev.gpuckpt.hook.after-restore":            hook(curl + " | cmp - /run/canary"),
		"dev.gpuckpt.hook.after-restore.on-failure": "refuse",
	}, Amend: []oci.SpecOpts{
		oci.WithProcessArgs(host.Executable, "-m", "http.server", fmt.Sprint(port), "--directory", "/srv/answers"),
		oci.WithMounts([]specs.Mount{{Type: "bind", Source: filepath.Dir(answer), Destination: "/srv/answers", Options: []string{"rbind", "ro", "rprivate"}}}),
	}}
	k := start(t, false, spec, "counter.py") // its arguments are amended
	serves := func() bool {
		r, err := http.Get(url)
		return err == nil && r.Body.Close() == nil && r.StatusCode == http.StatusOK
	}
	harness.Within(t, "it serves", serves)
	ref := checkpoint(t, result, k)
	k.MustRemove(t)
	k = restore(t, result, k, ref)
	if !serves() {
		t.Error("it does not serve after the restore")
	}
	k.MustRemove(t)
	says("43")
	_, err = shared.Restore(t.Context(), k.ID, ref, port)
	harness.Says(t, err, "hook after-restore", "differ")
}
