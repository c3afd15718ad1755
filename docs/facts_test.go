// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package docs_test

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// section is what lies between two headings of a page.
type section struct {
	page, title string
	lines       []string // without blocks of code
	numbers     []int
}

// sections are those of the pages for users.
func sections(t *testing.T) (found []section) {
	t.Helper()
	for path, text := range documents(t) {
		if strings.Contains(path, "/") && path != "../README.md" {
			continue
		}
		s := section{page: path}
		prose(text, func(number int, line string) {
			if strings.HasPrefix(line, "#") {
				found = append(found, s)
				s = section{page: path, title: strings.TrimLeft(line, "# ")}
				return
			}
			s.lines, s.numbers = append(s.lines, line), append(s.numbers, number)
		})
		found = append(found, s)
	}
	return found
}

func (s section) text() string { return strings.Join(s.lines, "\n") }

var (
	resultLink = regexp.MustCompile(`\]\((?:docs/)?(results/[^)#]+)(?:#([^)]+))?\)`)
	figure     = regexp.MustCompile(`(\d+(?:\.\d+)?) (s|ms|µs|GB/s)\b`)
)

// notMeasured are sections whose figures are no results of ours, and why.
var notMeasured = map[string]string{
	"comparison.md, Speed of the others, read": "the projects' own, with their sources",
	"comparison.md, What people ask":           "the users' own",
	"compatibility.md":                         "made of results",
}

// Figures of times and rates are in the results that their section links to.
func TestFigures(t *testing.T) {
	checked := 0
	for _, s := range sections(t) {
		if notMeasured[s.page] != "" || notMeasured[s.page+", "+s.title] != "" {
			continue
		}
		var sources []source
		for _, link := range resultLink.FindAllStringSubmatch(s.text(), -1) {
			sources = append(sources, read(t, link[1], link[2]))
		}
		for i, line := range s.lines {
			for _, match := range figure.FindAllStringSubmatch(regexp.MustCompile("`[^`]*`").ReplaceAllString(line, ""), -1) {
				checked++
				if !slices.ContainsFunc(sources, func(from source) bool { return from.has(match[1], match[2]) }) {
					t.Errorf("%s:%d: %s is in no result that the section %q links to", s.page, s.numbers[i], match[0], s.title)
				}
			}
		}
	}
	if checked < 80 {
		t.Errorf("only %d figures were found", checked)
	}
}

// source is what a result says: words, or numbers in seconds.
type source struct {
	text    string
	numbers []float64
}

// has reports whether it has the figure, to as many digits as that has.
func (s source) has(number, unit string) bool {
	if regexp.MustCompile(`(^|[^\d.])` + regexp.QuoteMeta(number) + `0?([^\d]|$)`).MatchString(s.text) {
		return true
	}
	value, _ := strconv.ParseFloat(number, 64)
	_, decimals, _ := strings.Cut(number, ".")
	half := math.Pow10(-len(decimals)) / 2 * 1.0001
	return slices.ContainsFunc(s.numbers, func(n float64) bool {
		return math.Abs(n*map[string]float64{"s": 1, "ms": 1e3, "µs": 1e6, "GB/s": 1e-9}[unit]-value) <= half
	})
}

// read returns what a file of docs/results says: of a page of text the part below the anchor, of a
// benchmark the medians, of other results all numbers.
func read(t *testing.T, path, anchor string) source {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		return source{} // TestLinks says so
	}
	if filepath.Ext(path) != ".json" {
		text := string(data)
		if anchor != "" {
			_, text, _ = strings.Cut(text, "\n## "+anchor)
			text, _, _ = strings.Cut(text, "\n## ")
		}
		return source{text: text + rounded(text)}
	}
	var bench struct {
		Runs []map[string]any
	}
	if json.Unmarshal(data, &bench) == nil && len(bench.Runs) > 0 && bench.Runs[0]["method"] != nil {
		return source{numbers: medians(bench.Runs)}
	}
	var all any
	if err := json.Unmarshal(data, &all); err != nil {
		t.Fatal(err)
	}
	return source{numbers: numbers(all)}
}

// rounded is each number of a text with one and two digits fewer.
func rounded(text string) string {
	var b strings.Builder
	for _, number := range regexp.MustCompile(`\d+\.\d+`).FindAllString(text, -1) {
		value, _ := strconv.ParseFloat(number, 64)
		fmt.Fprintf(&b, " %.1f %.2f %.0f ", value, value, value)
	}
	return b.String()
}

// medians are those of each case and method of a benchmark.
func medians(runs []map[string]any) (found []float64) {
	groups := make(map[string][]float64)
	for _, run := range runs {
		if run["verified"] != true {
			continue
		}
		for _, operation := range []string{"checkpoint", "restore"} {
			took, _ := run[operation].(map[string]any)
			if s, ok := took["seconds"].(float64); ok {
				key := fmt.Sprint(operation, run["content"], run["sizeBytes"], run["procs"], run["media"], run["mode"], run["method"], run["hostMemoryBytes"])
				groups[key] = append(groups[key], s)
			}
		}
	}
	for _, times := range groups {
		slices.Sort(times)
		n := len(times)
		found = append(found, (times[(n-1)/2]+times[n/2])/2)
	}
	return found
}

// numbers are all in a value of JSON.
func numbers(value any) (found []float64) {
	switch v := value.(type) {
	case float64:
		found = append(found, v)
	case []any:
		for _, e := range v {
			found = append(found, numbers(e)...)
		}
	case map[string]any:
		for _, e := range v {
			found = append(found, numbers(e)...)
		}
	}
	return found
}

var (
	negative = regexp.MustCompile(`(?i)\b(refused|refuses|not tried|not run|no test|not supported|not been (tried|run))\b`)
	ofTree   = regexp.MustCompile("`(Test\\w+)`")
)

// owners are the parts of pages that tell of what is refused or was not tried, with sources: a link to one is a source.
var owners = regexp.MustCompile(`\]\([^)]*(limits|troubleshooting|secure|security|compatibility|interposer)\.md[^)]*\)|\]\((docs/)?(limits|interposer|configuration|gpus|objects|suspend|cli)\.md#|\]\(#|\]\(docs/limits\.md\)`)

// claims are the pages that say what works and what does not.
var claims = []string{"../README.md", "clients.md", "comparison.md", "gpus.md", "interposer.md", "limits.md", "performance.md"}

// What is refused, or was not tried, says where that is from: a text of the code, a test, a result, or
// the part of another page that does.
func TestRefusals(t *testing.T) {
	printed, declared, checked := literals(t), tests(t), 0
	for _, s := range sections(t) {
		text := s.text()
		if !slices.Contains(claims, s.page) || !negative.MatchString(text) || s.title == "Not tried" || s.title == "Machines" {
			continue
		}
		checked++
		known := resultLink.MatchString(text) || owners.MatchString(text) || slices.ContainsFunc(ofTree.FindAllStringSubmatch(text, -1), func(m []string) bool { return declared[m[1]] })
		for _, span := range regexp.MustCompile("[`*\"]([^`*\"\n]+)[`*\"]").FindAllStringSubmatch(text, -1) {
			known = known || strings.Contains(strings.TrimSpace(span[1]), " ") && strings.Contains(printed, span[1])
		}
		if !known {
			line := slices.IndexFunc(s.lines, negative.MatchString)
			t.Errorf("%s:%d: nothing in the section %q says where this is from: %s", s.page, s.numbers[max(line, 0)], s.title, s.lines[max(line, 0)])
		}
	}
	if checked < 20 {
		t.Errorf("only %d sections were found", checked)
	}
}

// tests are the names of all tests.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	there, declared := make(map[string]bool), regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err := filepath.WalkDir("..", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, match := range declared.FindAllStringSubmatch(string(source), -1) {
			there[match[1]] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return there
}

// topics are what people ask about first: how pages call it, and how the table of what was restored does.
var topics = []struct{ words, row *regexp.Regexp }{
	{regexp.MustCompile(`(?i)NCCL over NVLink`), regexp.MustCompile(`NCCL.* over NVLink`)},
	{regexp.MustCompile(`(?i)tensor[ -]parallel`), regexp.MustCompile(`over two GPUs, NCCL in CUDA graphs`)},
	{regexp.MustCompile(`JAX over (several|two)`), regexp.MustCompile(`JAX over two GPUs`)},
	{regexp.MustCompile("CUDA IPC|torch.multiprocessing"), regexp.MustCompile(`CUDA IPC \(`)},
	{regexp.MustCompile(`vLLM`), regexp.MustCompile(`vLLM`)},
	{regexp.MustCompile(`SGLang`), regexp.MustCompile(`SGLang`)},
	{regexp.MustCompile(`TensorRT`), regexp.MustCompile(`TensorRT`)},
	{regexp.MustCompile(`\bMIG\b`), regexp.MustCompile(`\bMIG\b`)},
	{regexp.MustCompile(`arm64`), regexp.MustCompile(`arm64`)},
}

// No page says that something is refused or was not tried which compatibility.md, made of results, has
// among what was restored. With the interposer alone is said so.
func TestStale(t *testing.T) {
	_, restored, _ := strings.Cut(documents(t)["compatibility.md"], "## Programs that travel")
	restored, _, _ = strings.Cut(restored, "\n## Refused")
	rows := strings.Split(restored, "\n")
	denied := regexp.MustCompile(`(?i)\b(refused|refuses|not tried|not run|no test|not supported|not been (tried|run)|cannot)\b|: no\b|\| no\b`)
	end := regexp.MustCompile(`[.;!?](\s+|$)`)
	if len(rows) < 20 {
		t.Fatalf("compatibility.md has %d rows", len(rows))
	}
	for _, s := range sections(t) {
		if s.page == "compatibility.md" {
			continue
		}
		var parts []string
		for paragraph := range strings.SplitSeq(s.text(), "\n\n") {
			if paragraph = strings.TrimSpace(paragraph); strings.HasPrefix(paragraph, "|") {
				parts = append(parts, strings.Split(paragraph, "\n")...) // a row says one thing
			} else {
				parts = append(parts, end.Split(strings.Join(strings.Fields(paragraph), " "), -1)...)
			}
		}
		for _, part := range parts {
			for _, topic := range topics {
				if !denied.MatchString(part) || !topic.words.MatchString(part) {
					continue
				}
				said := regexp.MustCompile(`interposer|without`).MatchString(part + s.title)
				for _, row := range rows {
					if topic.row.MatchString(row) && (!said || !strings.Contains(row, "with the interposer")) {
						t.Errorf("%s, %q, says %q; compatibility.md has: %s", s.page, s.title, part, row)
						break
					}
				}
			}
		}
	}
}
