// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package commands

import (
	"regexp"
	"slices"
)

// Elsewhere says which test runs lines, or why none does.
type Elsewhere struct {
	Document string
	Section  string // a regular expression of all of its name; "" is any
	Lines    string // a regular expression
	Test     string // FILE:FUNCTION, from the top of the tree
	Reason   string // why no test runs them
}

// Others are about all lines but those of Sessions.
var Others = []Elsewhere{
	{Document: "cli.md", Section: "Checkpoint|Restore|Look at a checkpoint|Sign a checkpoint|Registries|Other forms|List and remove checkpoints|Single processes|As cuda-checkpoint", Lines: `^(gpuckpt|ctr|openssl|cuda-checkpoint|mkdir) `, Test: "integration/registry/documented_test.go:TestDocumentedCommands"},
	{Document: "cli.md", Section: "Other forms|List and remove checkpoints", Lines: `^(gpuckpt ls|mkdir dump)$`, Test: "integration/registry/documented_test.go:TestDocumentedCommands"},
	{Document: "cli.md", Section: "Several containers in one cut", Lines: `trainer reader`, Test: "integration/registry/cut_test.go:TestCut"},
	{Document: "cli.md", Section: "Several containers in one cut", Lines: `--pod `, Test: "integration/kubernetes/pod_by_command_test.go:TestPodByCommand"},
	{Document: "cli.md", Section: "While the image arrives", Test: "integration/registry/arriving_test.go:TestRestoreWhileItArrives"},
	{Document: "cli.md", Section: "Sign a checkpoint", Lines: `^cosign `, Test: "integration/registry/sign_test.go:TestCosign"},
	{Document: "cli.md", Section: "As cuda-checkpoint", Lines: `^ln -s `, Reason: "it writes into the system; make has such a link in .build/bin, which the test of the other lines runs"},
	{Document: "operate.md", Section: "What was done, and how long it took", Lines: `^ctr events `, Test: "integration/suspend/events_test.go:TestEvents"},
	{Document: "clients.md", Section: "Compose", Test: "integration/nerdctl/compose_test.go:TestCompose"},
	{Document: "interposer.md", Section: "Use it", Test: "integration/checkpoint/interposer_test.go:TestInterposer"},
	{Document: "clients.md", Section: "Docker", Test: "integration/docker/docker_test.go:TestDocker"}, // make test-docker
	{Document: "kubernetes.md", Section: "From nothing to a restored pod in ten commands", Test: "integration/kubernetes/documented_test.go:TestDocument"},
	{Document: "kubernetes.md", Section: "Nodes by a DaemonSet", Lines: `^kubectl `, Test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{Document: "kubernetes.md", Section: "Checkpoints as objects", Lines: `^kubectl `, Test: "integration/kubernetes/objects_test.go:TestObjects"},
	{Document: "security.md", Section: "Keys in a cluster", Test: "integration/kubernetes/objects_test.go:TestObjects"},
	{Document: "objects.md", Section: "Move a pod", Test: "integration/kubernetes/objects_test.go:TestObjects"},
	{Document: "objects.md", Section: "Scale out from a checkpoint|A Job that is preempted", Test: "integration/kubernetes/objects_test.go:TestObjects"},
	{Document: "install.md", Section: "Check what you downloaded", Test: "hack/release/whole/whole_test.go:TestDocument"},
	{Document: "install.md", Section: "Debian and Ubuntu", Test: "hack/release/whole/whole_test.go:TestDocument"},
	{Document: "install.md", Section: "Any other Linux", Test: "hack/release/whole/whole_test.go:TestDocument"},
	{Document: "install.md", Section: "Uninstall", Lines: `^(gpuckpt|apt-get) `, Test: "hack/release/whole/whole_test.go:TestDocument"},
	{Document: "install.md", Section: "Fedora and RHEL", Reason: "it needs a machine with rpm's glibc; TestRpm of hack/release/whole installs the package with rpm, and Debian's dnf did with a stand-in for glibc"},
	{Document: "install.md", Section: "containerd's configuration", Test: "integration/install/containerd_test.go:TestContainerds"},
	{Document: "install.md", Section: "A cluster", Lines: `^kubectl `, Test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{Document: "install.md", Section: "A cluster", Lines: `^ctr `, Test: "integration/install/image_test.go:TestFromImage"},
	// As make test-release runs it: with a release's image and chart, and helm.
	{Document: "install.md", Section: "A cluster|Uninstall", Lines: `^helm `, Test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{Document: "install.md", Section: "Offline", Test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{Document: "kubernetes.md", Section: "Nodes by a DaemonSet", Lines: `^helm install`, Test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{Document: "kubernetes.md", Section: "Checkpoints as objects", Lines: `^helm `, Reason: "hack/release renders the chart with the agent by Helm's library, and compares it with deploy/agent, which TestObjects applies"},
	{Document: "install.md", Section: "Make a release", Reason: "make test-release builds one, for minutes"},
	{Document: "change-it.md", Section: "On a machine with a GPU", Reason: "it needs a real GPU"},
	{Document: "interposer.md", Section: "Measure it", Lines: `^python3 `, Reason: "it needs a real GPU, with PyTorch"},
	{Document: "compatibility.md", Section: "Recipes: vLLM and SGLang", Reason: "it needs a real GPU, vLLM and SGLang, and models; the page says that it was not run"},
	{Document: "operate.md", Section: "For schedulers", Lines: `kubectl`, Reason: "it needs a cluster; the command before the pipe is run"},
	{Lines: `^gpuckpt resume --gpus 1 job$`, Test: "integration/suspend/share_gpu_test.go:TestUnseenGPU"},
	{Lines: `^nvidia-ctk `, Reason: "NVIDIA's container toolkit, with a real GPU"},
	{Lines: `^make |^(hack|integration)/|^\.ci/run$|^export GPUCKPT_BIN=|^GPUCKPT_BIN=|^go test |^\.build/bin/`, Reason: "what builds and runs the tests themselves; CI begins with it, and TestMake looks for each target"},
}

// Session is a document's sections whose lines TestSessions of integration/documents runs, one after
// the other, but those that Others has.
type Session struct {
	Document string
	Sections []string
}

// Sessions are in the order in which they are run.
var Sessions = []Session{
	{Document: "gpus.md", Sections: []string{"The CDI specification"}},
	{Document: "gpu-host.md", Sections: []string{
		"3. Write a CDI specification", "4. Check the host", "5. Run a container", "6. Checkpoint and restore", "7. Suspend and resume",
	}},
	{Document: "README.md", Sections: []string{"Install", "Use"}},
	{Document: "suspend.md", Sections: []string{"Suspend a container in place"}},
	{Document: "images.md", Sections: []string{"Run it to restore"}},
	{Document: "clients.md", Sections: []string{"nerdctl"}},
	{Document: "configuration.md", Sections: []string{"Annotations of a container"}},
	{Document: "operate.md", Sections: []string{
		"Check a node", "For schedulers", "What was done, and how long it took", "A container is stuck", "A client was killed between its pause and its resume",
	}},
	{Document: "cli.md", Sections: []string{"Recover after a crash"}},
	{Document: "security.md", Sections: []string{"Signatures"}},
}

// Covers reports whether the entry is about the line.
func (o Elsewhere) Covers(l Line) bool {
	return (o.Document == "" || o.Document == l.Document) && (o.Section == "" || regexp.MustCompile("^(?:"+o.Section+")$").MatchString(l.Section)) &&
		regexp.MustCompile(o.Lines).MatchString(l.Text)
}

// Is reports whether a line is in the session's sections.
func (s Session) Is(l Line) bool {
	return s.Document == l.Document && slices.Contains(s.Sections, l.Section)
}
