// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/gpuckpt/gpuckpt/docs/english"
)

// Every gpuckpt command in the documents and in the help texts' examples is one that there is, with
// flags that it has and as many arguments as it takes. Tests elsewhere run those of cli.md,
// kubernetes.md and install.md.
func TestDocumentsCall(t *testing.T) {
	files, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	internals, err := filepath.Glob("../../docs/internals/*.md")
	if err != nil {
		t.Fatal(err)
	}
	block := regexp.MustCompile("(?ms)^ *```(?:sh)?\n(.*?)^ *```")
	lines := map[string][]string{}
	for _, file := range append(append(files, internals...), "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range block.FindAllStringSubmatch(string(text), -1) {
			lines[file] = append(lines[file], strings.Split(m[1], "\n")...)
		}
	}
	var examples func(c *cobra.Command)
	examples = func(c *cobra.Command) {
		lines[c.CommandPath()] = strings.Split(c.Example, "\n")
		for _, sub := range c.Commands() {
			examples(sub)
		}
	}
	examples(rootCommand())
	call := regexp.MustCompile(`^(?:\$ )?(?:CRIU_PATH=\S+ )?gpuckpt ([^ ].*)$`)
	end, inner := regexp.MustCompile(`\s+#.*$|\s*[|>].*$|\s*&&.*$`), regexp.MustCompile(`\$\(.*?\)`)
	checked := 0
	for where, some := range lines {
		for _, line := range some {
			m := call.FindStringSubmatch(strings.TrimSpace(line))
			if m == nil {
				continue
			}
			checked++
			command := inner.ReplaceAllString(strings.ReplaceAll(m[1], "--pid PID", "--pid 4711"), "ID")
			if err := parses(strings.Fields(end.ReplaceAllString(command, ""))); err != nil {
				t.Errorf("%s: %s: %v", where, line, err)
			}
		}
	}
	if checked < 60 {
		t.Errorf("only %d commands were found", checked)
	}
}

// parses reads a call as cobra does, and runs nothing.
func parses(args []string) error {
	root := rootCommand()
	c, rest, err := root.Find(args)
	if err != nil {
		return err
	}
	c.InitDefaultHelpFlag()
	c.InitDefaultVersionFlag()
	if err := c.ParseFlags(rest); err != nil {
		return err
	}
	if c.Flags().Changed("help") || c.Flags().Changed("version") || c.Name() == "completion" || c.Parent() != nil && c.Parent().Name() == "completion" {
		return nil
	}
	return c.ValidateArgs(c.Flags().Args())
}

// The help texts are plain English, as the documents are.
func TestHelpEnglish(t *testing.T) {
	checked := 0
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		// What is indented is a table or a command.
		texts := map[string]string{"short": c.Short, "long": regexp.MustCompile(`(?m)^  .*$`).ReplaceAllString(c.Long, "")}
		for _, flags := range []*pflag.FlagSet{c.Flags(), c.PersistentFlags()} {
			flags.VisitAll(func(f *pflag.Flag) { texts["--"+f.Name] = f.Usage })
		}
		for where, text := range texts {
			english.Paragraphs(text, func(_ int, paragraph string) {
				checked++
				for _, fault := range english.Faults(paragraph) {
					t.Errorf("%s, %s: %s", c.CommandPath(), where, fault)
				}
			})
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	check(rootCommand())
	if checked < 100 {
		t.Errorf("only %d texts were found", checked)
	}
}
