// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// line is a command line in a document.
type line struct {
	document, section string // "gpu-host.md", "5. Run a container"
	number            int
	text              string // without its comment
	prompted          bool   // it begins with "$ ", at the margin
}

// commandLines returns the command lines of a document. A block of code has a command in each line
// if it is marked as sh or not at all, or only in the lines that begin with "$ ", if there are any.
func commandLines(t *testing.T, path string) (found []line) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	comment := regexp.MustCompile(`(^|\s+)# .*$`)
	section, kind := "", ""
	var block []line
	inside := false
	for i, text := range strings.Split(string(data), "\n") {
		trimmed := strings.TrimSpace(text)
		switch mark, fence := strings.CutPrefix(trimmed, "```"); {
		case fence && !inside:
			inside, kind, block = true, mark, nil
		case fence:
			inside = false
			if kind == "" || kind == "sh" {
				found = append(found, prompted(block)...)
			}
		case inside:
			if command := comment.ReplaceAllString(trimmed, ""); command != "" {
				block = append(block, line{filepath.Base(path), section, i + 1, command, strings.HasPrefix(text, "$ ")})
			}
		case strings.HasPrefix(text, "#"):
			section = strings.TrimLeft(text, "# ")
		}
	}
	return found
}

// prompted returns the lines of a block that begin with "$ ", without it, or all if none does.
func prompted(block []line) (found []line) {
	for _, l := range block {
		if l.prompted {
			l.text = strings.TrimPrefix(l.text, "$ ")
			found = append(found, l)
		}
	}
	if found == nil {
		return block
	}
	return found
}

// elsewhere says which test runs lines, or why none does.
type elsewhere struct {
	document string
	section  string // "" is any
	lines    string // a regular expression
	test     string // FILE:FUNCTION, from the top of the tree
	reason   string // why no test runs them
}

var others = []elsewhere{
	{document: "cli.md", lines: `^(gpuckpt (checkpoint|restore|image|key|cuda|ls|rm|prune) .*|gpuckpt ls|cuda-checkpoint .*|ctr .*|openssl .*|mkdir dump|gpuckpt key .*)$`, test: "integration/registry/documented_test.go:TestDocumentedCommands"},
	{document: "cli.md", section: "Sign a checkpoint", lines: `^cosign `, test: "integration/registry/sign_test.go:TestCosign"},
	{document: "cli.md", section: "As cuda-checkpoint", lines: `^ln -s `, reason: "it writes into the system; make has such a link in .build/bin, which the test of the other lines runs"},
	{document: "kubernetes.md", section: "From nothing to a restored pod in ten commands", test: "integration/kubernetes/documented_test.go:TestDocument"},
	{document: "kubernetes.md", section: "Nodes by a DaemonSet", lines: `^kubectl `, test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{document: "kubernetes.md", section: "Checkpoints as objects", test: "integration/kubernetes/objects_test.go:TestCheckpointObject"},
	{document: "install.md", section: "Check what you downloaded", test: "hack/release/whole/whole_test.go:TestDocument"},
	{document: "install.md", section: "Debian and Ubuntu", test: "hack/release/whole/whole_test.go:TestDocument"},
	{document: "install.md", section: "Any other Linux", test: "hack/release/whole/whole_test.go:TestDocument"},
	{document: "install.md", section: "Uninstall", lines: `^(gpuckpt|apt-get) `, test: "hack/release/whole/whole_test.go:TestDocument"},
	{document: "install.md", section: "Fedora and RHEL", reason: "it needs a machine with dnf; TestRpm of hack/release/whole installs the package with rpm"},
	{document: "install.md", section: "containerd's configuration", test: "integration/install/containerd_test.go:TestContainerds"},
	{document: "install.md", section: "A cluster", lines: `^kubectl `, test: "integration/kubernetes/daemonset_test.go:TestDaemonSet"},
	{document: "install.md", section: "A cluster", lines: `^ctr `, test: "integration/install/image_test.go:TestFromImage"},
	{lines: `^helm `, reason: "helm is not among the tests' programs; hack/release renders the chart with Helm's library and compares it with deploy/node"},
	{document: "install.md", section: "Uninstall", lines: `^kubectl `, reason: "it waits for what helm has begun"},
	{document: "install.md", section: "Offline", reason: "it moves a release that is not published"},
	{document: "install.md", section: "Make a release", reason: "make test-release builds one, for minutes"},
	{document: "change-it.md", section: "On a machine with a GPU", reason: "it needs a real GPU"},
	{document: "compatibility.md", section: "Recipes: vLLM and SGLang", reason: "it needs a real GPU, vLLM and SGLang, and models; the page says that it was not run"},
	{document: "doctor.md", section: "For schedulers", lines: `kubectl`, reason: "it needs a cluster; the command before the pipe is run"},
	{document: "doctor.md", section: "A machine with an H200", reason: "what it printed is shown"},
	{lines: `^gpuckpt resume --gpus 1 job$`, test: "integration/suspend/share_gpu_test.go:TestUnseenGPU"},
	{lines: `^nvidia-ctk `, reason: "NVIDIA's container toolkit, with a real GPU"},
	{lines: `^make |^(hack|integration)/|^\.ci/run$|^export GPUCKPT_BIN=|^GPUCKPT_BIN=|^go test |^\.build/bin/`, reason: "what builds and runs the tests themselves; CI begins with it, and TestMake looks for each target"},
}

// Each command line of the documents is run by a test, or a reason is known why it is not.
func TestEveryLine(t *testing.T) {
	sessions := make(map[[2]string]bool)
	for _, s := range session {
		for _, section := range s.sections {
			sessions[[2]string{s.document, section}] = true
		}
	}
	usedSessions, used := make(map[[2]string]bool), make([]bool, len(others))
	count := 0
	for _, path := range paths(t) {
		for _, l := range commandLines(t, path) {
			count++
			known := false
			for i, o := range others {
				if o.covers(t, l) {
					used[i], known = true, true
				}
			}
			here := [2]string{l.document, l.section}
			usedSessions[here] = usedSessions[here] || sessions[here]
			if !known && !sessions[here] {
				t.Errorf("%s:%d: no test runs %q: name its section, %q, in what TestSessions runs, or a test or a reason in the table here", path, l.number, l.text, l.section)
			}
		}
	}
	if count < 150 {
		t.Errorf("only %d command lines were found", count)
	}
	for i, o := range others {
		if !used[i] {
			t.Errorf("no line of the documents is what this is about: %+v", o)
		}
		if (o.test == "") == (o.reason == "") {
			t.Errorf("neither test nor reason, or both: %+v", o)
		}
		if file, function, ok := strings.Cut(o.test, ":"); ok {
			data, err := os.ReadFile(filepath.Join("../..", file))
			if err != nil || !strings.Contains(string(data), "\nfunc "+function+"(") {
				t.Errorf("there is no %s: %v", o.test, err)
			}
		}
	}
	for section := range sessions {
		if !usedSessions[section] {
			t.Errorf("%q has no command lines", section)
		}
	}
}

// covers reports whether the entry is about the line.
func (o elsewhere) covers(t *testing.T, l line) bool {
	t.Helper()
	matched, err := regexp.MatchString(o.lines, l.text)
	if err != nil {
		t.Fatal(err)
	}
	return matched && (o.document == "" || o.document == l.document) && (o.section == "" || o.section == l.section)
}

// What the documents have made, make knows.
func TestMake(t *testing.T) {
	makefile, err := os.ReadFile("../../Makefile")
	if err != nil {
		t.Fatal(err)
	}
	checked := 0
	for _, path := range paths(t) {
		for _, l := range commandLines(t, path) {
			words := strings.Fields(l.text)
			if words[0] != "make" {
				continue
			}
			for _, word := range words[1:] {
				if strings.Contains(word, "=") {
					break // variables, to the end of the line
				}
				checked++
				if !regexp.MustCompile(`(?m)^` + regexp.QuoteMeta(word) + `:`).Match(makefile) {
					t.Errorf("%s:%d: make has no %s", path, l.number, word)
				}
			}
		}
	}
	if checked < 20 {
		t.Errorf("only %d targets were found", checked)
	}
}

// paths are the documents with commands for users.
func paths(t *testing.T) []string {
	t.Helper()
	found, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	return append(found, "../../README.md", "../../CONTRIBUTING.md")
}
