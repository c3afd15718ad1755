// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"bytes"
	"fmt"
	"os"
	"testing"

	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// What is in a pod's /dev/shm, or in a volume in memory there, is in another pod's after a restore:
// the program goes on with the file that it had mapped.
func TestShm(t *testing.T) {
	results.Add(t)
	secrets := map[string]any{"imagePullSecrets": []any{map[string]any{"name": pullSecret}}}
	memory := map[string]any{
		"imagePullSecrets": secrets["imagePullSecrets"],
		"volumes":          []any{map[string]any{"name": "dshm", "emptyDir": map[string]any{"medium": "Memory"}}},
	}
	mounted := map[string]any{"volumeMounts": []any{map[string]any{"name": "dshm", "mountPath": "/dev/shm"}}}
	for _, test := range []struct {
		name           string
		pod, container map[string]any
	}{{"pod", secrets, nil}, {"volume", memory, mounted}} {
		t.Run(test.name, func(t *testing.T) {
			name := podName(t)
			givePullSecret(t, shared(t))
			old := apply(t, shared(t), name+"-old", counter{args: []string{"--shared", "/dev/shm/shared"}, pod: test.pod, container: test.container})
			expect(t, old, counterPort, "101")
			want := sharedFile(t, old)
			archive, err := shared(t).Checkpoint(t.Context(), old.Metadata.Name, "counter", 0)
			if err != nil {
				t.Fatalf("%v\n%s", err, shared(t).LogTail(4000))
			}
			ref := publish(t, shared(t), archive, name+":1")
			pod := apply(t, shared(t), name, counter{image: ref, annotations: restoring, pod: test.pod, container: test.container})
			expect(t, pod, counterPort, "102")
			if !bytes.Equal(sharedFile(t, pod), want) {
				t.Error("the file is another one")
			}
		})
	}
}

// sharedFile returns the content of a pod's /dev/shm/shared.
func sharedFile(t *testing.T, pod node.Pod) []byte {
	t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/root/dev/shm/shared", pidOf(t, shared(t), pod.Container("counter"))))
	if err != nil {
		t.Fatal(err)
	}
	return data
}
