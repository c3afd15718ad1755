// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package docs_test keeps the documents true where a program can tell.
package docs_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/gpuckpt/gpuckpt/images"
)

// documents are the texts for users, by their paths.
func documents(t *testing.T) map[string]string {
	t.Helper()
	texts := make(map[string]string)
	for _, pattern := range []string{"*.md", "internals/*.md", "decisions/*.md", "results/*.md", "../*.md", "../hack/*.md", "../integration/softcuda/*.md"} {
		paths, err := filepath.Glob(pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range paths {
			data, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			texts[path] = string(data)
		}
	}
	return texts
}

// prose calls f with each line of a document that is not in a block of code.
func prose(text string, f func(number int, line string)) {
	code := false
	for i, line := range strings.Split(text, "\n") {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			code = !code
		} else if !code {
			f(i+1, line)
		}
	}
}

// The example of a gpuckpt.json is one.
func TestFormatExample(t *testing.T) {
	block := regexp.MustCompile("(?s)```json\n(.*?)```").FindStringSubmatch(documents(t)["internals/format.md"])
	if block == nil {
		t.Fatal("format.md has no example")
	}
	if _, err := images.ParseMetadata([]byte(block[1])); err != nil {
		t.Error(err)
	}
}

// Links to files and to headings lead somewhere.
func TestLinks(t *testing.T) {
	texts := documents(t)
	links := regexp.MustCompile(`\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"`)
	for path, text := range texts {
		for _, link := range links.FindAllStringSubmatch(text, -1) {
			to, anchor, _ := strings.Cut(link[1]+link[2], "#")
			if strings.Contains(to, "://") {
				continue
			}
			target := path
			if to != "" {
				target = filepath.Join(filepath.Dir(path), to)
			}
			if inside, ok := strings.CutPrefix(target, "../docs/"); ok {
				target = inside
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s: %v", path, to, err)
				continue
			}
			if anchor != "" && !anchors(texts[target])[anchor] {
				t.Errorf("%s links to %s, which has no heading #%s", path, target, anchor)
			}
		}
	}
}

// anchors are the names by which a document's headings are linked to.
func anchors(text string) map[string]bool {
	found := make(map[string]bool)
	drop := regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	prose(text, func(_ int, line string) {
		if heading, ok := strings.CutPrefix(strings.TrimLeft(line, "#"), " "); ok && strings.HasPrefix(line, "#") {
			found[strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(heading), ""), " ", "-")] = true
		}
	})
	return found
}

// The steps of a checkpoint, a restore and a suspension are named as in the code,
// and none is left out.
func TestStepsExplained(t *testing.T) {
	texts := documents(t)
	names := regexp.MustCompile(`(?:Name|Back): "([^"]+)"|q\.time\([^"]*"([^"]+)"|Phase\{Name: "([^"]+)"`)
	for file, document := range map[string]string{
		"../runtime/checkpoint.go": "internals/how-it-works.md", "../runtime/restore.go": "internals/how-it-works.md", "../runtime/suspend.go": "suspend.md",
	} {
		source, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		found := names.FindAllStringSubmatch(string(source), -1)
		if len(found) == 0 {
			t.Errorf("%s has no steps", file)
		}
		for _, match := range found {
			name := match[1] + match[2] + match[3]
			if guide := strings.Join(strings.Fields(texts[document]), " "); !strings.Contains(guide, "`"+name+"`") && !strings.Contains(guide, "**"+name+"**") && !strings.Contains(guide, name+"**") {
				t.Errorf("%s does not explain the step %q of %s", document, name, file)
			}
		}
	}
}

// The recorded demo has the steps that the code has today, and ends as it must.
func TestRecording(t *testing.T) {
	recorded, err := os.ReadFile("demo.svg")
	if err != nil {
		t.Fatal(err)
	}
	printed := literals(t)
	steps := regexp.MustCompile(`>    (\S[^|]*\S) +\|`).FindAllStringSubmatch(string(recorded), -1)
	for _, step := range steps {
		if !strings.Contains(printed, "\n"+step[1]+"\n") {
			t.Errorf("docs/demo.svg has the step %q, which no code has: record make demo again", step[1])
		}
	}
	if len(steps) < 15 || !strings.Contains(string(recorded), "counter before: 101, after restore: 102") {
		t.Errorf("docs/demo.svg has %d steps", len(steps))
	}
}

// Each test that the model of threats and the promises name is there. Each finding of the review has a row
// with a test, or one that says that it is open.
func TestSecurityNamesTests(t *testing.T) {
	there := tests(t)
	texts, named := documents(t), regexp.MustCompile("`(Test\\w+)`")
	for _, path := range []string{"security.md", "internals/guard.md", "../SECURITY.md"} {
		for _, match := range named.FindAllStringSubmatch(texts[path], -1) {
			if !there[match[1]] {
				t.Errorf("%s names %s, and there is no such test", path, match[1])
			}
		}
	}
	for n := range 21 {
		row := regexp.MustCompile(fmt.Sprintf(`(?m)^\| F%d \|.*\|([^|]+)\|$`, n)).FindStringSubmatch(texts["internals/guard.md"])
		if row == nil || !named.MatchString(row[1]) && strings.TrimSpace(row[1]) != "open" {
			t.Errorf("guard.md has no row for F%d with a test, or one that is open", n)
		}
	}
}

// A line of prose has at most 100 columns, so that a change shows as one.
func TestWidth(t *testing.T) {
	for path, text := range documents(t) {
		prose(text, func(number int, line string) {
			alone := !strings.Contains(strings.TrimSpace(line), " ") || strings.HasPrefix(line, "![")
			if n := utf8.RuneCountInString(line); n > 100 && !strings.HasPrefix(line, "|") && !alone {
				t.Errorf("%s:%d has %d columns, at most 100", path, number, n)
			}
		})
	}
}

// A table has a head, and as many cells in each row.
func TestTables(t *testing.T) {
	for path, text := range documents(t) {
		var table []string
		check := func(number int) {
			if len(table) == 0 {
				return
			}
			cells := func(row string) int { return strings.Count(strings.ReplaceAll(row, `\|`, ""), "|") }
			if len(table) < 2 || !strings.HasPrefix(strings.ReplaceAll(table[1], " ", ""), "|--") {
				t.Errorf("%s:%d: the table before this line has no head", path, number)
			}
			for _, row := range table {
				if spans := regexp.MustCompile("`[^`]*`").ReplaceAllString(row, ""); cells(spans) != cells(table[0]) {
					t.Errorf("%s:%d: a row of the table before this line has other cells than its head: %s", path, number, row)
				}
			}
			table = nil
		}
		prose(text+"\n", func(number int, line string) {
			if strings.HasPrefix(line, "|") {
				table = append(table, line)
			} else {
				check(number)
			}
		})
	}
}

// Files, directories and packages of the tree that a document names are there.
func TestPaths(t *testing.T) {
	spans := regexp.MustCompile("`([^`\n]+)`")
	inTree := regexp.MustCompile(`^(cmd|runtime|cuda|cdi|images|internal|integration|bench|hack|deploy|docs|\.ci)/[a-zA-Z0-9_./-]+$`)
	room := regexp.MustCompile(`^((?:cmd|runtime|cuda|cdi|images|internal)(?:/[a-z0-9-]+)*) {2,}`)
	for path, text := range documents(t) {
		if strings.HasPrefix(path, "results/") {
			continue // as it was then
		}
		var named []string
		for _, span := range spans.FindAllStringSubmatch(text, -1) {
			if inTree.MatchString(span[1]) && !regexp.MustCompile(`[A-Z]{3}`).MatchString(filepath.Base(span[1])) {
				named = append(named, span[1])
			}
		}
		if path == "internals/change-it.md" { // the tree of rooms
			for line := range strings.SplitSeq(text, "\n") {
				if match := room.FindStringSubmatch(line); match != nil {
					named = append(named, match[1])
				}
			}
		}
		for _, name := range named {
			if _, err := os.Stat(filepath.Join("..", strings.TrimSuffix(name, "/..."))); err != nil {
				t.Errorf("%s names %s: %v", path, name, err)
			}
		}
	}
}

// Each room of the house is in the tree of change-it.md, by the last part of its path.
func TestRooms(t *testing.T) {
	_, tree, _ := strings.Cut(documents(t)["internals/change-it.md"], "## The rooms")
	tree, _, _ = strings.Cut(tree, "## Where to look")
	for _, top := range []string{"cmd", "runtime", "internal", "cuda", "cdi", "images"} {
		err := filepath.WalkDir(filepath.Join("..", top), func(path string, entry fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.Contains(path, "/testdata/") {
				return err
			}
			if room := filepath.Base(filepath.Dir(path)); !regexp.MustCompile(`\b` + room + `\b`).MatchString(tree) {
				t.Errorf("change-it.md does not list %s", filepath.Dir(path))
				return filepath.SkipDir
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// foreign are texts that others than this project print.
var foreign = []string{
	"CUDA_ERROR_", "no space left on device", "already exists", "Can't bind inet socket", "no such CDI device",
	"container's cgroup is not empty", "cannot pause a paused container", "snapshot \"", "Address already in use",
}

// The errors and log lines that troubleshooting.md explains are in the code in
// these words.
func TestErrorTexts(t *testing.T) {
	printed := literals(t)
	first := regexp.MustCompile("`([^`]+)`")
	// What the code fills in: N, X, a version, what is left out.
	filled := regexp.MustCompile(`…|gpuckpt\.json|\b[A-Z]\b|\b\d+\.\d[\d.]*\b`)
	checked, quoted := false, 0
	prose(documents(t)["troubleshooting.md"], func(number int, line string) {
		if !strings.HasPrefix(line, "|") {
			checked = false
			return
		}
		cell, _, _ := strings.Cut(line[1:], " | ")
		if !strings.Contains(line, "`") {
			checked = checked || strings.Contains(cell, " says")
			return
		}
		if !checked {
			return
		}
		for _, span := range first.FindAllStringSubmatch(cell, -1) {
			for _, part := range filled.Split(span[1], -1) {
				part = strings.Trim(part, " :;,")
				if !strings.Contains(part, " ") || containsAny(part, foreign) {
					continue
				}
				quoted++
				if !strings.Contains(printed, part) {
					t.Errorf("troubleshooting.md:%d quotes %q, which no code prints", number, part)
				}
			}
		}
	})
	if quoted < 20 {
		t.Errorf("%d texts were found in troubleshooting.md", quoted)
	}
}

func containsAny(text string, parts []string) bool {
	for _, part := range parts {
		if strings.Contains(text, part) {
			return true
		}
	}
	return false
}

// literals are all texts in the product's Go code, a line each.
func literals(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir("..", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			switch name := d.Name(); {
			case name == "integration", name == "bench", name == "hack", name == "docs", name == "testdata", strings.HasPrefix(name, ".") && name != "..":
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(file, func(n ast.Node) bool {
			e, ok := n.(ast.Expr)
			if !ok {
				return true
			}
			text, ok := literal(e)
			if ok {
				fmt.Fprintln(&all, text)
			}
			return !ok
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

// literal is the text of an expression of literals.
func literal(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		text, err := strconv.Unquote(e.Value)
		return text, e.Kind == token.STRING && err == nil
	case *ast.BinaryExpr:
		x, okX := literal(e.X)
		y, okY := literal(e.Y)
		return x + y, okX && okY && e.Op == token.ADD
	}
	return "", false
}

// status is the line of a decision that says whether and since when it stands.
var status = regexp.MustCompile(`\nStatus: (stands|replaced|withdrawn)(.+\n)*?.*2026-\d\d-\d\d`)

// A page of decisions is short, numbered, in the index, and says whether and since when it stands.
func TestDecisions(t *testing.T) {
	texts := documents(t)
	index := texts["decisions/README.md"]
	for path, text := range texts {
		name, ok := strings.CutPrefix(path, "decisions/")
		if !ok || name == "README.md" {
			continue
		}
		if lines := strings.Count(text, "\n"); lines > 45 {
			t.Errorf("%s has %d lines, at most 45", path, lines)
		}
		if number, _, _ := strings.Cut(name, "-"); !strings.HasPrefix(text, "# "+number+" ") {
			t.Errorf("%s does not begin with # %s", path, number)
		}
		if !status.MatchString(text) {
			t.Errorf("%s has no line \"Status: …\" with a date", path)
		}
		if !strings.Contains(index, "("+name+")") {
			t.Errorf("decisions/README.md does not list %s", name)
		}
	}
}
