// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package nerdctl

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/docs/commands"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// The file and the commands of docs/clients.md: a service of nerdctl compose with a GPU is
// checkpointed, and continues. nerdctl asks for the GPU by NVIDIA's hook, which would fail here: the
// runtime gives the GPU by the CDI specification.
func TestCompose(t *testing.T) {
	results.Add(t)
	document := os.Getenv("GPUCKPT_SOURCE")
	if document == "" {
		document = filepath.Join("..", "..")
	}
	document = filepath.Join(document, "docs", "clients.md")
	text, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?s)```yaml\n(services:.*?)```").FindSubmatch(text)
	if block == nil {
		t.Fatal("clients.md has no compose file")
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	file := strings.Replace(string(block[1]), "image: IMAGE", fmt.Sprintf("image: %s\n    command: [counter, --port, %q]\n    network_mode: host", harness.WorkloadImage, fmt.Sprint(port)), 1)
	hook := filepath.Join(dir, "nvidia-container-cli")
	if err := errors.Join(os.WriteFile(filepath.Join(dir, "compose.yaml"), []byte(file), 0o600), os.WriteFile(hook, []byte("#!/bin/false\n"), 0o700)); err != nil {
		t.Fatal(err)
	}
	shared.Configured(t, fmt.Sprintf("cdi_spec_dirs = [%q]\n", filepath.Join(shared.Dir(), "cdi")))
	t.Setenv("PATH", dir+":"+bins.SearchPath()+":"+os.Getenv("PATH"))
	lines, err := commands.Of(document)
	if err != nil {
		t.Fatal(err)
	}
	k, count, ran := container{"train-job-1", port, true}, 101, 0
	removeAtEnd(t, k.name)
	for _, l := range lines {
		if l.Section != "Compose" {
			continue
		}
		ran++
		args := strings.Fields(l.Text)[1:]
		if args[0] == "compose" {
			args = append([]string{"compose", "--file", filepath.Join(dir, "compose.yaml")}, args[1:]...)
		}
		out := must(t, args...)
		switch args[len(args)-1] {
		case "first":
			if status := k.status(t); status != "exited" {
				t.Fatalf("after its checkpoint the service is %s", status)
			}
		case "ps":
			if !strings.Contains(out, k.name) {
				t.Errorf("compose ps: %s", out)
			}
		case "down":
			if _, err := nerdctl(t.Context(), "inspect", k.name); err == nil {
				t.Error("compose down leaves the container")
			}
		default:
			k.expect(t, fmt.Sprint(count))
			count++
		}
	}
	if ran != 5 || count != 103 {
		t.Errorf("%d commands were run, and the counter came to %d", ran, count)
	}
}
