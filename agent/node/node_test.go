// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// standIn is a Node whose gpuckpt is a script. The script finds its arguments in $ALL.
func standIn(t *testing.T, script string) Node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root may change the root directory")
	}
	path := filepath.Join(t.TempDir(), "gpuckpt")
	if err := os.WriteFile(path, []byte("#!/bin/sh\nALL=\"$*\"\n"+script), 0o700); err != nil {
		t.Fatal(err)
	}
	return Node{Root: "/", Program: path, Containerd: "/run/c.sock", PlainHTTP: true, Env: []string{"HOME=/root", "DOCKER_CONFIG=/root/.docker"}}
}

var wanted = Wanted{Namespace: "ns", Pod: "job", Containers: []string{"a", "b"}, Image: "ours:1", Target: "r.test/job:k", Credentials: []byte(`{"auths":{}}`)}

// A checkpoint is one command, by the pod's name and the containers'. Its credentials are in no file
// system, and it has none of the node's own.
func TestCheckpoint(t *testing.T) {
	said := filepath.Join(t.TempDir(), "said")
	n := standIn(t, `{ echo "$ALL"; echo "HOME=$HOME DOCKER_CONFIG=$DOCKER_CONFIG"; cat "$REGISTRY_AUTH_FILE"; echo; readlink "$REGISTRY_AUTH_FILE"; } >`+said+`
echo '{"containers": [{"name": "a", "image": "ours:1-a", "bytes": 5, "gpuBytes": 3, "pausedSeconds": 0.5, "push": {"image": "r.test/job:k-a", "digest": "sha256:1", "movedBytes": 4, "seconds": 2}}, {"name": "b", "image": "ours:1-b", "pushError": "no route"}]}'
for l in '{"step":"dump","done":9}' '{"step":"a push","done":1,"total":4}' '{"step":"b push","done":1,"total":6}' '{"step":"a push","done":4,"total":4}' '{"error": "no route"}'; do echo "$l" >&2; done
exit 1
`)
	w, far := wanted, ""
	w.Progress = func(done, total uint64) { far += fmt.Sprintf(" %d/%d", done, total) }
	made, err := n.Checkpoint(t.Context(), w)
	if far != " 1/4 2/10 5/10" {
		t.Errorf("the pushes were at%s", far)
	}
	if err != nil || len(made) != 2 || made[0].Push == nil || *made[0].Push != (Pushed{"r.test/job:k-a", "sha256:1", 4, 2}) || made[0].GPUBytes != 3 || made[1].Push != nil || made[1].PushError != "no route" {
		t.Errorf("%+v, %v", made, err)
	}
	text, err := os.ReadFile(said)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) < 4 || lines[0] != "checkpoint --pod ns/job --image ours:1 --push r.test/job:k --leave-running a b --plain-http --json --address /run/c.sock --namespace k8s.io" ||
		lines[1] != "HOME= DOCKER_CONFIG=" || lines[2] != `{"auths":{}}` || !strings.HasPrefix(lines[3], "/memfd:") {
		t.Errorf("it was asked %q", lines)
	}
}

// What an agent has left are images by their names.
func TestTaken(t *testing.T) {
	n := standIn(t, `case "$ALL" in
"ls ours: --json --address /run/c.sock --namespace k8s.io") echo '[{"image": "ours:2-b", "container": "b", "bytes": 5, "gpuBytes": 3}, {"image": "ours:2-a", "container": "a"}]' ;;
"ls others:"*) echo '[]' ;;
*) exit 1 ;;
esac
`)
	made, err := n.Taken(t.Context(), "ours:")
	if want := []Captured{{Name: "b", Image: "ours:2-b", Bytes: 5, GPUBytes: 3}, {Name: "a", Image: "ours:2-a"}}; err != nil || !slices.Equal(made, want) {
		t.Errorf("%+v, %v", made, err)
	}
	if made, err := n.Taken(t.Context(), "others:"); err != nil || made != nil {
		t.Errorf("%+v, %v", made, err)
	}
	// One that the kubelet has removed needs no removal.
	if gone, there := n.Discard(t.Context(), "others:1"), n.Discard(t.Context(), "ours:"); gone != nil || there == nil {
		t.Errorf("%v, %v", gone, there)
	}
}

// What was refused has no images.
func TestRefused(t *testing.T) {
	n := standIn(t, `echo '{"error": "managed memory"}' >&2; exit 1`)
	if made, err := n.Checkpoint(t.Context(), wanted); made != nil || err == nil || err.Error() != "managed memory" {
		t.Errorf("%+v, %v", made, err)
	}
}

// One that takes too long says so, and not what the signal did.
func TestTooLong(t *testing.T) {
	n := standIn(t, `trap 'echo "{\"error\": \"context canceled\"}" >&2; exit 1' TERM
while :; do sleep 0.05; done
`)
	w := wanted
	w.Limit = 3 * time.Second // in which the script is to begin
	if _, err := n.Checkpoint(t.Context(), w); err == nil || !strings.HasPrefix(err.Error(), "it was not complete within 3s") {
		t.Error(err)
	}
}

// The limit is the checkpoint's. What is not in the registry by then is sent all the same.
func TestPushGoesOn(t *testing.T) {
	n := standIn(t, `case "$ALL" in
checkpoint*)
	trap 'echo "{\"containers\": [{\"name\": \"a\", \"image\": \"ours:1-a\", \"pushError\": \"context canceled\"}, {\"name\": \"b\", \"image\": \"ours:1-b\", \"pushError\": \"context canceled\"}]}"; exit 1' TERM
	while :; do sleep 0.05; done;;
"image push containerd:ours:1-a r.test/job:k-a"*) echo '{"image": "r.test/job:k-a", "digest": "sha256:1"}';;
*) echo "{\"error\": \"$ALL\"}" >&2; exit 1;;
esac
`)
	w := wanted
	w.Limit = 3 * time.Second // in which the script is to begin
	made, err := n.Checkpoint(t.Context(), w)
	if err != nil || len(made) != 2 || made[0].Push == nil || made[0].Push.Digest != "sha256:1" || made[0].PushError != "" ||
		made[1].Push != nil || !strings.HasPrefix(made[1].PushError, "image push containerd:ours:1-b r.test/job:k-b") {
		text, _ := json.Marshal(made) // for the eye
		t.Errorf("%s, %v", text, err)
	}
}

// Images that are pushed one after the other have one progress, which never goes back.
func TestPushProgress(t *testing.T) {
	n := standIn(t, `case "$ALL" in *ours:2-b*) exit 1;; esac
for l in '{"step":"push"}' '{"step":"push","done":1,"total":2}' '{"step":"push","done":2,"total":2}'; do echo "$l" >&2; done
echo '{}'
`)
	w, far := wanted, ""
	w.Progress = func(done, total uint64) { far += fmt.Sprintf(" %d/%d", done, total) }
	n.Push(t.Context(), w, []Captured{
		{Image: "ours:2-a", Bytes: 20}, {Image: "ours:2-b", Bytes: 100}, {Image: "ours:2-c", Bytes: 40, Push: &Pushed{}}, {Image: "ours:2-d", Bytes: 60},
	})
	if far != " 0/220 10/220 20/220 160/220 190/220 220/220" {
		t.Errorf("the pushes were at%s", far)
	}
}
