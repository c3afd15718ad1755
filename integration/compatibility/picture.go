// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io/fs"
	"path"
	"regexp"
	"strconv"
	"strings"
)

// wait is how long a user of the server waits for its first answer.
type wait struct {
	o      outcome
	medium string // where the images are
	by     string // what restores it, or its program; "" where the medium says it
	number string // of the outcome
}

// waits are those that there are results of; a start without a checkpoint comes first.
func waits(latest map[string]outcome) (found []wait) {
	const test = "TestFirstAnswer/transformers-"
	for _, w := range []wait{
		{latest[test+"tmpfs"], "cold start", "", "cold_answer_seconds"},
		{latest[test+"tmpfs"+interposed], "tmpfs", "", "first_answer_seconds"},
		{latest[test+"tmpfs"], "tmpfs", "", "first_answer_seconds"},
		{latest[test+"registry"+interposed], "registry", "`gpuckpt restore --pull`", "first_answer_by_restore_seconds"},
		{latest[test+"registry"], "registry", "`gpuckpt restore --pull`", "first_answer_by_restore_seconds"},
		{latest[test+"registry"], "registry", "`ctr images pull` and `ctr run`", "first_answer_by_stock_seconds"},
		{latest[test+"disk"], "disk", "", "first_answer_seconds"},
		{latest["TestFirstAnswer/tmpfs"], "tmpfs, with a large KV cache", "", "first_answer_seconds"},
	} {
		if w.o.passed() && w.o.Numbers[w.number] > 0 {
			found = append(found, w)
		}
	}
	return found
}

// interposed ends the name of a test whose program had the interposer.
const interposed = ", with the interposer"

// interposed reports whether the programs of a run had the interposer: its file is named for that.
func (o outcome) interposed() bool {
	return strings.Contains(o.file, "-companion") || strings.Contains(o.file, "-interposer")
}

// picture draws the waits as bars.
func picture(latest map[string]outcome) []byte {
	var bars []bar
	for _, w := range waits(latest) {
		class, label := "bar", "restored from a "+w.medium
		if w.by != "" {
			label = w.medium + ": " + strings.ReplaceAll(w.by, "`", "")
		}
		if strings.HasPrefix(w.medium, "cold") {
			class, label = "cold", w.medium
		}
		commit := w.o.run.Commit[:min(7, len(w.o.run.Commit))]
		notes := []string{strings.TrimPrefix(w.o.run.GPUs[0].Name, "NVIDIA "), size(w.o.Numbers["gpu_bytes"]), commit}
		if w.o.interposed() {
			notes = append(notes, "with the interposer")
		}
		bars = append(bars, bar{class, label, strings.Join(notes, ", "), w.o.Numbers[w.number]})
	}
	return barPicture("Seconds until a server of Llama 3 8B's shape gives its first answer", "(GPU, its memory in use, commit)", bars)
}

// bar is one of a picture.
type bar struct {
	class       string // "bar", or "cold": what it is compared with
	label, note string
	seconds     float64
}

// barPicture draws seconds as bars, for a light page and for a dark one.
func barPicture(title, note string, all []bar) []byte {
	const width, row, left, bars = 880, 44, 390, 400
	longest := 0.0
	for _, w := range all {
		longest = max(longest, w.seconds)
	}
	var b strings.Builder
	height := 62 + row*len(all)
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" role="img" font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif" font-size="15">
<title>%s.</title>
<style>
.back { fill: #ffffff; stroke: #d0d7de; }
.cold { fill: #8c959f; }
.bar { fill: #2da44e; }
text { fill: #1f2328; }
.dim { fill: #57606a; font-size: 12px; }
.head { font-weight: 600; }
@media (prefers-color-scheme: dark) {
.back { fill: #0d1117; stroke: #30363d; }
.bar { fill: #3fb950; }
text { fill: #e6edf3; }
.dim { fill: #9198a1; }
}
</style>
<rect class="back" x="0.5" y="0.5" width="%d" height="%d" rx="8"/>
<text class="head" x="20" y="32">%s <tspan class="dim">%s</tspan></text>
`, width, height, title, width-1, height-1, title, note)
	for i, w := range all {
		y := 50 + row*i
		length := bars * w.seconds / longest
		fmt.Fprintf(&b, `<text x="20" y="%d">%s</text><text class="dim" x="20" y="%d">%s</text>`, y+14, w.label, y+30, w.note)
		fmt.Fprintf(&b, `<rect class="%s" x="%d" y="%d" width="%.0f" height="24" rx="3"/><text class="head" x="%.0f" y="%d">%.1f s</text>`+"\n",
			w.class, left, y+4, length, left+length+8, y+21, w.seconds)
	}
	b.WriteString("</svg>\n")
	return []byte(b.String())
}

// pictures are those of the pages, by their names.
func pictures(results fs.FS, latest map[string]outcome) (map[string][]byte, error) {
	pause, err := pausePicture(results)
	if err != nil {
		return nil, err
	}
	restore, err := restorePicture(results)
	if err != nil {
		return nil, err
	}
	journey, err := journeyPicture(results, latest["kubernetes/TestJourney"])
	if err != nil {
		return nil, err
	}
	return map[string][]byte{"first-answer.svg": picture(latest), "pause.svg": pause, "restore.svg": restore, "journey.svg": journey}, nil
}

// step is a line of TestJourney: how many seconds had passed, and what had come of them.
var step = regexp.MustCompile(`([\d.]+) s  ((?:gpuckpt|its|the|a) .*)\n`)

// journeyPicture draws the times of a server's way through a cluster: the log beside the results has them.
func journeyPicture(results fs.FS, o outcome) ([]byte, error) {
	text, err := fs.ReadFile(results, path.Join(path.Dir(o.file), "journey.txt"))
	if err != nil {
		return nil, err
	}
	var bars []bar
	for _, m := range step.FindAllStringSubmatch(string(text), -1) {
		seconds, err := strconv.ParseFloat(m[1], 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m[0], err)
		}
		what, how, _ := strings.Cut(m[2], ", ")
		class := "cold"
		if strings.HasPrefix(how, "restored") {
			class = "bar"
		}
		bars = append(bars, bar{class, what, how, seconds})
	}
	note := fmt.Sprintf("(%s, 4 GiB of its memory, %s)", strings.TrimPrefix(o.run.GPUs[0].Name, "NVIDIA "), o.run.Commit[:7])
	return barPicture("Seconds from the installation in a cluster", note, bars), nil
}
