// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

const referencePage = "../../docs/reference.md"

var write = flag.Bool("write", false, "write docs/reference.md (make reference)")

// docs/reference.md is what the code says: commands and flags, settings, annotations, metrics, and the
// fields of the objects.
func TestReference(t *testing.T) {
	var b bytes.Buffer
	b.WriteString("# Reference\n\n<!-- Written by make reference out of the code. Do not edit. -->\n\n" +
		"[Commands](#commands), [settings of a node](#settings-of-a-node), [annotations](#annotations),\n[metrics](#metrics), [objects in a cluster](#objects-in-a-cluster). The release has man pages of the\ncommands.\n")
	commandsReference(&b, rootCommand())
	settingsReference(t, &b)
	annotationsReference(t, &b)
	metricsReference(t, &b)
	objectsReference(t, &b)
	reasonsReference(t, &b)
	if *write {
		if err := os.WriteFile(referencePage, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	page, err := os.ReadFile(referencePage)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(page, b.Bytes()) {
		t.Error("docs/reference.md is not what the code says: run make reference")
	}
	for _, known := range []string{"### gpuckpt image push", "| `--leave-running` |", "| `[staging]` `when_short` | `\"refuse\"` |", "| `dev.gpuckpt.on-checkpoint` |", "| `gpuckpt_operations_total` | `operation`, `outcome` |", "| `spec.pod` |"} {
		if !strings.Contains(string(page), known) {
			t.Errorf("docs/reference.md lacks %q", known)
		}
	}
}

// commandsReference writes each command with its flags. Flags that three commands or more have in the
// same words are written once.
func commandsReference(b *bytes.Buffer, root *cobra.Command) {
	all := []*cobra.Command{}
	var walk func(c *cobra.Command)
	walk = func(c *cobra.Command) {
		if c.Hidden || c.Name() == "help" {
			return
		}
		if c.Runnable() && len(c.Commands()) == 0 {
			all = append(all, c)
		}
		for _, sub := range c.Commands() {
			walk(sub)
		}
	}
	walk(root)
	uses := make(map[string]int)
	first := make(map[string]*pflag.Flag)
	for _, c := range all {
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			uses[flagRow(f)]++
			first[flagRow(f)] = f
		})
	}
	b.WriteString("\n## Commands\n\n`gpuckpt COMMAND --help` says more. The exit status is 0, or 1 after an error.\n\nFlags of several commands:\n\n| flag | default | meaning |\n|---|---|---|\n")
	var shared []string
	for row, n := range uses {
		if n >= 3 {
			shared = append(shared, row)
		}
	}
	slices.SortFunc(shared, func(x, y string) int { return cmp.Or(cmp.Compare(first[x].Name, first[y].Name), cmp.Compare(x, y)) })
	last := ""
	for _, row := range shared {
		if first[row].Name != last { // --json has two texts, of which one will do
			b.WriteString(row)
		}
		last = first[row].Name
	}
	root.PersistentFlags().VisitAll(func(f *pflag.Flag) { b.WriteString(flagRow(f)) })
	for _, c := range all {
		use := regexp.MustCompile(` \[flags\]$`).ReplaceAllString(c.UseLine(), "")
		fmt.Fprintf(b, "\n### %s\n\n%s.\n\n`%s`\n", c.CommandPath(), c.Short, use)
		var own, others []string
		c.LocalNonPersistentFlags().VisitAll(func(f *pflag.Flag) {
			switch row := flagRow(f); {
			case f.Hidden || f.Name == "help":
			case slices.Contains(shared, row):
				others = append(others, "`--"+f.Name+"`")
			default:
				own = append(own, row)
			}
		})
		if len(own) > 0 {
			b.WriteString("\n| flag | default | meaning |\n|---|---|---|\n" + strings.Join(own, ""))
		}
		if len(others) > 0 {
			b.WriteString("\n" + wrapped("And "+strings.Join(others, ", ")+".") + "\n")
		}
	}
}

func flagRow(f *pflag.Flag) string {
	name := "--" + f.Name
	if f.Shorthand != "" {
		name = "-" + f.Shorthand + "`, `" + name
	}
	usage, value := strings.ReplaceAll(f.Usage, "`", ""), ""
	if d := strings.Trim(f.DefValue, "[]"); d != "" && d != "false" && d != "0" && d != "0s" {
		value = "`" + d + "`"
	}
	if before, after, ok := strings.Cut(usage, "(default: "); ok {
		value, usage = strings.TrimSuffix(after, ")"), strings.TrimSpace(before)
	}
	return fmt.Sprintf("| `%s` | %s | %s |\n", name, cell(value), cell(usage))
}

// settingsReference writes the node's settings, as the comments on the fields of config.Node have them.
func settingsReference(t *testing.T, b *bytes.Buffer) {
	t.Helper()
	fields := make(map[string]string) // TYPE.Field: its comment
	for _, file := range parsed(t, "../../internal/node/config") {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					for _, name := range f.Names {
						fields[spec.Name.Name+"."+name.Name] = f.Doc.Text()
					}
				}
			}
			return false
		})
	}
	b.WriteString("\n## Settings of a node\n\n`/etc/gpuckpt/config.toml`; [configuration.md](configuration.md) says more, and\n[config.example.toml](config.example.toml) has all of them.\n\n| setting | default | meaning |\n|---|---|---|\n")
	var walk func(section string, v reflect.Value)
	walk = func(section string, v reflect.Value) {
		for i := range v.NumField() {
			field := v.Type().Field(i)
			name := field.Tag.Get("toml")
			if field.Type.Kind() == reflect.Struct { // after all settings of its own
				walk("`["+name+"]` ", v.Field(i))
				continue
			}
			text := fields[v.Type().Name()+"."+field.Name]
			if text == "" {
				t.Errorf("the setting %s has no comment", name)
			}
			fmt.Fprintf(b, "| %s`%s` | %s | %s |\n", section, name, byDefault(v.Field(i)), cell(saying(text)))
		}
	}
	walk("", reflect.ValueOf(config.Default()))
}

func byDefault(v reflect.Value) string {
	switch v.Kind() {
	case reflect.String:
		return "`" + strconv.Quote(v.String()) + "`"
	case reflect.Slice:
		var items []string
		for i := range v.Len() {
			items = append(items, strconv.Quote(v.Index(i).String()))
		}
		return "`[" + strings.Join(items, ", ") + "]`"
	case reflect.Map:
		return "none"
	}
	if v.Type() == reflect.TypeFor[config.Duration]() {
		d := time.Duration(v.Int())
		return "`\"" + regexp.MustCompile(`([hm])0[ms](0s)?$`).ReplaceAllString(d.String(), "$1") + "\"`"
	}
	return fmt.Sprintf("`%v`", v.Interface())
}

// annotationsReference writes those of a container, as the comments of package annotations have them.
func annotationsReference(t *testing.T, b *bytes.Buffer) {
	t.Helper()
	b.WriteString("\n## Annotations\n\nOf a container, or of a pod with [`pod_annotations`](images.md#in-kubernetes);\n[configuration.md](configuration.md#annotations-of-a-container) says more.\n\n| annotation | meaning |\n|---|---|\n")
	constantRows(t, b, "../../images/annotations", "On a container")
	fmt.Fprintf(b, "| `%s` | `OLD=NEW,…`, UUIDs or indices: [which GPU of the checkpoint becomes which](gpus.md#where-a-checkpoints-gpus-go) |\n", cdi.PairsAnnotation)
	b.WriteString("\nOf the manifest of a checkpoint image, and of a node, to compare:\n\n| annotation | meaning |\n|---|---|\n")
	constantRows(t, b, "../../images/annotations", "On the manifest")
	b.WriteString("\nOf a Task Update, [to suspend and resume](suspend.md#for-clients):\n\n| annotation | meaning |\n|---|---|\n")
	constantRows(t, b, "../../images/annotations", "On a Task Update")
}

// constantRows writes the constants of the group of a package whose comment begins so.
func constantRows(t *testing.T, b *bytes.Buffer, dir, begins string) {
	t.Helper()
	for _, file := range parsed(t, dir) {
		for _, decl := range file.Decls {
			group, ok := decl.(*ast.GenDecl)
			if !ok || !strings.HasPrefix(group.Doc.Text(), begins) {
				continue
			}
			for _, spec := range group.Specs {
				value := spec.(*ast.ValueSpec)
				key, err := strconv.Unquote(value.Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				if strings.HasSuffix(key, ".") {
					key += "…"
				}
				text, _, _ := strings.Cut(value.Doc.Text(), "\n\n")
				fmt.Fprintf(b, "| `%s` | %s |\n", key, cell(saying(text)))
			}
		}
	}
}

// metricsReference writes the metrics, as internal/cli/oplogcmd/internal/metrics registers them.
func metricsReference(t *testing.T, b *bytes.Buffer) {
	t.Helper()
	b.WriteString("\n## Metrics\n\nOf `gpuckpt metrics`; [operate.md](operate.md#what-was-done-and-how-long-it-took) says more.\n\n| metric | labels | meaning |\n|---|---|---|\n")
	for _, file := range parsed(t, "../../internal/cli/oplogcmd/internal/metrics") {
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			// The name, the help and the labels are in this order in each registration.
			var texts []string
			ast.Inspect(call, func(n ast.Node) bool {
				if l, ok := n.(*ast.BasicLit); ok && l.Kind == token.STRING {
					text, _ := strconv.Unquote(l.Value)
					texts = append(texts, text)
				}
				return true
			})
			if len(texts) < 2 || !strings.HasPrefix(texts[0], "gpuckpt_") {
				return true
			}
			var labels []string
			for _, l := range texts[2:] {
				labels = append(labels, "`"+l+"`")
			}
			fmt.Fprintf(b, "| `%s` | %s | %s |\n", texts[0], strings.Join(labels, ", "), cell(texts[1]))
			return false
		})
	}
}

// property is what the definition of an object says of a field.
type property struct {
	Description string
	Properties  yaml.Node
	Enum        []string
}

// objectsReference writes the fields of the objects, as their definitions describe them.
func objectsReference(t *testing.T, b *bytes.Buffer) {
	t.Helper()
	data, err := os.ReadFile("../../deploy/chart/files/crds/crds.yaml")
	if err != nil {
		t.Fatal(err)
	}
	b.WriteString("\n## Objects in a cluster\n\nOf the group `gpuckpt.dev/v1alpha1`; `kubectl explain` says the same.\n[kubernetes.md](kubernetes.md) and [objects.md](objects.md) have examples.\n")
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	for {
		var crd struct {
			Spec struct {
				Names    struct{ Kind string }
				Versions []struct {
					Schema struct {
						OpenAPIV3Schema property `yaml:"openAPIV3Schema"`
					}
				}
			}
		}
		if decoder.Decode(&crd) != nil {
			return
		}
		fmt.Fprintf(b, "\n### %s\n\n| field | meaning |\n|---|---|\n", crd.Spec.Names.Kind)
		var walk func(path string, p property)
		walk = func(path string, p property) {
			if values := p.Enum; len(values) > 0 {
				p.Description = strings.TrimPrefix(strings.Join(values, ", ")+"; "+p.Description, "; ")
				p.Description = strings.TrimSuffix(p.Description, "; ")
			}
			if p.Description != "" {
				fmt.Fprintf(b, "| `%s` | %s |\n", path, cell(p.Description))
				return
			}
			for i := 0; i+1 < len(p.Properties.Content); i += 2 {
				var sub property
				if err := p.Properties.Content[i+1].Decode(&sub); err != nil {
					t.Fatal(err)
				}
				walk(strings.TrimPrefix(path+"."+p.Properties.Content[i].Value, "."), sub)
			}
		}
		for _, v := range crd.Spec.Versions {
			walk("", v.Schema.OpenAPIV3Schema)
		}
	}
}

// reasonsReference writes the reasons of events and conditions. Events and failures name no other one.
func reasonsReference(t *testing.T, b *bytes.Buffer) {
	t.Helper()
	b.WriteString("\n### Reasons\n\nOf events and of conditions. The message has the cause.\n\n| reason | meaning |\n|---|---|\n")
	constantRows(t, b, "../../agent/api", "Reasons ")
	own := regexp.MustCompile(`^"[A-Z][a-z]\w+"$`)
	for _, dir := range []string{"", "cluster", "tell"} {
		for _, file := range parsed(t, "../../agent/"+dir) {
			ast.Inspect(file, func(n ast.Node) bool {
				call, _ := n.(*ast.CallExpr)
				if call == nil {
					return true
				}
				if of, ok := call.Fun.(*ast.SelectorExpr); !ok || of.Sel.Name != "Event" && of.Sel.Name != "Fail" {
					return true
				}
				for _, arg := range call.Args {
					if text, ok := arg.(*ast.BasicLit); ok && own.MatchString(text.Value) {
						t.Errorf("agent/%s: the reason %s is no constant of agent/api", dir, text.Value)
					}
				}
				return true
			})
		}
	}
}

// parsed are the files of a package without its tests, in the order of their names.
func parsed(t *testing.T, dir string) (files []*ast.File) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%s: %d files, %v", dir, len(paths), err)
	}
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}

// saying is a comment without its subject: "LogDir keeps logs." is "keeps logs".
func saying(comment string) string {
	text := strings.TrimSuffix(strings.Join(strings.Fields(comment), " "), ".")
	text = regexp.MustCompile(`^[A-Z]\w+ (is |are |decides |says that )?`).ReplaceAllString(text, "")
	return text
}

func cell(text string) string { return strings.ReplaceAll(text, "|", `\|`) }

// wrapped breaks a text into lines of 100 columns at most.
func wrapped(text string) string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > 100 {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return strings.Join(append(lines, line), "\n")
}
