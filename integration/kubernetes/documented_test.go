// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package kubernetes

import (
	"archive/tar"
	"compress/gzip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/kubernetes/node"
)

// sourceDir is where the documents and deploy/ are: the tree, or in a bundle
// $GPUCKPT_SOURCE.
func sourceDir(t *testing.T) string {
	t.Helper()
	for _, dir := range []string{"../..", os.Getenv("GPUCKPT_SOURCE")} {
		if _, err := os.Stat(filepath.Join(dir, "docs", "kubernetes.md")); dir != "" && err == nil {
			abs, err := filepath.Abs(dir)
			if err != nil {
				t.Fatal(err)
			}
			return abs
		}
	}
	t.Fatal("docs/kubernetes.md is neither in the tree nor in $GPUCKPT_SOURCE")
	return ""
}

// The commands of docs/kubernetes.md, as they are there, on a node whose containerd
// has the configuration in deploy/.
func TestDocument(t *testing.T) {
	results.Add(t)
	source := sourceDir(t)
	document := read(t, filepath.Join(source, "docs", "kubernetes.md"))
	block := regexp.MustCompile("(?s)```sh\n(.*?)```").FindStringSubmatch(document)
	if block == nil {
		t.Fatal("docs/kubernetes.md has no commands")
	}
	if lines := strings.Count(block[1], "\n"); lines != 10 {
		t.Errorf("docs/kubernetes.md promises ten commands and has %d", lines)
	}
	shim, err := bins.Path("containerd-shim-gpuckpt-v2")
	if err != nil {
		t.Fatal(err)
	}
	snippet := read(t, filepath.Join(source, "deploy", "containerd.toml"))
	runtimes := strings.NewReplacer("/usr/local/bin/containerd-shim-gpuckpt-v2", shim, "SystemdCgroup = true", "SystemdCgroup = false", "version = 3", "").Replace(snippet)
	n := own(t, node.Options{APIServer: true, Runtimes: runtimes})
	givePullSecret(t, n)
	pushWorkload(t, n, "gpuwork:latest")
	go func() {
		if err := n.Schedule(t.Context()); err != nil {
			t.Errorf("the scheduler: %v", err)
		}
	}()

	work := t.TempDir()
	if err := os.Symlink(filepath.Join(source, "deploy"), filepath.Join(work, "deploy")); err != nil {
		t.Fatal(err)
	}
	writePackage(t, filepath.Join(work, "gpuckpt.tar.gz"), snippet)
	if err := os.Mkdir(filepath.Join(work, "root"), 0o755); err != nil {
		t.Fatal(err)
	}
	// Up to the checkpoint, and from there on.
	before, after, found := strings.Cut(block[1], "ARCHIVE=")
	if !found {
		t.Fatal("docs/kubernetes.md does not checkpoint into $ARCHIVE")
	}
	runLines(t, n, work, before)
	first, err := n.Pod(t.Context(), "counter")
	if err != nil {
		t.Fatal(err)
	}
	expect(t, first, counterPort, "101")
	runLines(t, n, work, "ARCHIVE="+after)
	if _, err := os.Stat(filepath.Join(work, "root", "usr", "local", "bin", "containerd-shim-gpuckpt-v2")); err != nil {
		t.Error(err)
	}
	pod, err := n.Pod(t.Context(), "counter-restored")
	if err != nil {
		t.Fatal(err)
	}
	expect(t, pod, counterPort, "102")
}

// runLines runs lines of the document in a directory.
func runLines(t *testing.T, n *node.Node, dir, lines string) {
	t.Helper()
	cmd, err := n.Command(t.Context(), "kubectl") // for its environment
	if err != nil {
		t.Fatal(err)
	}
	shell := exec.CommandContext(t.Context(), "bash", "-euxo", "pipefail", "-c", standIns+lines)
	shell.Dir = dir
	shell.Env = append(append(cmd.Env, n.KubectlEnv()...),
		"NODE="+node.Name, "REGISTRY="+n.Registry().Host, "DESTDIR="+filepath.Join(dir, "root"),
		"CONTAINERD_ADDRESS="+n.Address(), "DOCKER_CONFIG="+credentialsDir(n))
	out, err := shell.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatalf("%v\n%s\n%s", err, n.KubeletLog(3000), n.LogTail(3000))
	}
}

// standIns are what the private node has not: systemd, and a registry with TLS.
const standIns = `
systemctl() { [[ "$*" == "restart containerd" ]]; }
gpuckpt() {
	if [[ $2 == push ]]; then command gpuckpt "$@" --plain-http; else command gpuckpt "$@"; fi
}
`

func read(t *testing.T, file string) string {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// pushWorkload puts the workload's image into the node's registry.
func pushWorkload(t *testing.T, n *node.Node, image string) {
	t.Helper()
	program, err := bins.Path("gpuwork")
	if err != nil {
		t.Fatal(err)
	}
	made, err := harness.BuildImage(t.Context(), harness.ImageSpec{
		Files: map[string]string{"/usr/bin/gpuwork": program}, Guests: gpu.LibraryFiles(), Entrypoint: []string{"/usr/bin/gpuwork"},
		// It must not be the workload's own: the kubelet runs what it has pulled with a secret, by whatever
		// name, for nobody without that secret.
		Env: []string{"GPUWORK_IMAGE=" + image},
	})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(n.Registry().Host+"/"+image, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	user, password := n.Registry().Login()
	if err := remote.Write(ref, made, remote.WithTransport(n.Registry().Transport()), remote.WithAuth(&authn.Basic{Username: user, Password: password}), remote.WithContext(t.Context())); err != nil {
		t.Fatal(err)
	}
}

// writePackage writes what `make package` makes, of the programs under test.
func writePackage(t *testing.T, file, config string) {
	t.Helper()
	f, err := os.Create(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z := gzip.NewWriter(f)
	w := tar.NewWriter(z)
	add := func(name string, mode int64, data []byte) {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	for _, program := range []string{"containerd-shim-gpuckpt-v2", "gpuckpt", "gpuckpt-cuda-helper"} {
		path, err := bins.Path(program)
		if err != nil {
			t.Fatal(err)
		}
		add("usr/local/bin/"+program, 0o755, []byte(read(t, path)))
	}
	add("etc/containerd/conf.d/gpuckpt.toml", 0o644, []byte(config))
	for _, c := range []interface{ Close() error }{w, z} {
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// Every supported containerd takes the configuration in deploy/ by an import, beside
// what its own configuration says of CRI. That may be of version 2, but for
// containerd 2.2, which then drops what it says, as docs/kubernetes.md warns.
func TestConfigurations(t *testing.T) {
	snippet := filepath.Join(sourceDir(t), "deploy", "containerd.toml")
	const two = "version = 2\n[plugins.'io.containerd.grpc.v1.cri'.containerd.runtimes.mine]\nruntime_type = 'io.containerd.runc.v2'\n"
	three := strings.NewReplacer("version = 2", "version = 3", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime").Replace(two)
	for _, program := range []string{"containerd", "containerd-2.2", "containerd-2.3"} {
		for version, main := range map[string]string{"2": two, "3": three} {
			t.Run(program+" version "+version, func(t *testing.T) {
				needs(t, program)
				config := filepath.Join(t.TempDir(), "config.toml")
				before, after, _ := strings.Cut(main, "\n")
				if err := os.WriteFile(config, []byte(before+"\nimports = ["+strconv.Quote(snippet)+"]\n"+after), 0o600); err != nil {
					t.Fatal(err)
				}
				path, err := bins.Path(program)
				if err != nil {
					t.Fatal(err)
				}
				out, err := exec.CommandContext(t.Context(), path, "--config", config, "config", "dump").Output()
				if err != nil {
					t.Fatal(err)
				}
				for _, want := range []string{"runtimes.gpuckpt]", "runtimes.gpuckpt.options]", "runtime_path = '/usr/local/bin/containerd-shim-gpuckpt-v2'", "pod_annotations = ['dev.gpuckpt.*']", "SystemdCgroup = true"} {
					if !strings.Contains(string(out), want) {
						t.Errorf("it has no %s", want)
					}
				}
				drops := program == "containerd-2.2" && version == "2"
				if kept := strings.Contains(string(out), "runtimes.mine]"); kept == drops {
					t.Errorf("what the configuration itself says is kept: %v", kept)
				}
			})
		}
	}
}
