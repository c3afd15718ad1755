// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"slices"
	"strings"
)

// table is a Markdown table in the making.
type table struct {
	columns []string
	rows    [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

// String aligns the columns; an empty table is nothing.
func (t *table) String() string {
	if len(t.rows) == 0 {
		return ""
	}
	widths := make([]int, len(t.columns))
	for _, row := range append([][]string{t.columns}, t.rows...) {
		for i, cell := range row {
			widths[i] = max(widths[i], len([]rune(cell)))
		}
	}
	var b strings.Builder
	line := func(row []string) {
		for i, cell := range row {
			fmt.Fprintf(&b, "| %s%s ", cell, strings.Repeat(" ", widths[i]-len([]rune(cell))))
		}
		b.WriteString("|\n")
	}
	line(t.columns)
	for _, w := range widths {
		b.WriteString("|" + strings.Repeat("-", w+2))
	}
	b.WriteString("|\n")
	for _, row := range t.rows {
		line(row)
	}
	return b.String()
}

// text is a median and its bounds, in seconds.
func (s spread) text() string {
	if s.Max == 0 {
		return "–"
	}
	if s.N == 1 {
		return strings.TrimSuffix(Seconds(s.Median), " s")
	}
	return fmt.Sprintf("%s (%s–%s)", strings.TrimSuffix(Seconds(s.Median), " s"), strings.TrimSuffix(Seconds(s.Min), " s"), strings.TrimSuffix(Seconds(s.Max), " s"))
}

// times is a ratio of medians, "4.58×".
func times(a, b spread) string {
	if a.N == 0 || b.N == 0 || b.Median == 0 {
		return "–"
	}
	return fmt.Sprintf("%.2f×", a.Median/b.Median)
}

// Markdown is results.md.
func (r *Results) Markdown() string {
	var b strings.Builder
	section := func(title, about string, t table) {
		if text := t.String(); text != "" {
			fmt.Fprintf(&b, "\n## %s\n\n%s\n\n%s", title, about, text)
		}
	}
	b.WriteString("# Benchmark\n\n" + r.header())
	groups := r.groups()
	section("Checkpoint and restore",
		"Medians (least–most) of verified runs, in seconds; the factor is the method's median over ours. "+
			"Memory is the most that the machine's available memory fell by, images on a tmpfs included.", mainTable(groups))
	section("What ours is made of",
		"The driver's share of each operation, the rest, and the share of the time that the shim's phases explain; medians.", shareTable(groups))
	section("Left running",
		"From the first request until the program may go on, by the shim's timeline, or by the answer to the request that lets it; the driver's two calls in it; "+
			"and the longest time for which a client that asks each millisecond had no answer.", downTable(groups))
	section("Several processes", "The time over that of one process with as much memory.", procsTable(groups))
	write, read := r.diskRates()
	section("Images on a disk", fmt.Sprintf("The disk takes %.2f GB/s and gives %.2f GB/s (parallel O_DIRECT, measured in the same call). "+
		"The bound is the larger of the same on a tmpfs and the images' bytes over the rate; flush is what the images then took to be on the disk for good.", write/1e9, read/1e9),
		diskTable(groups, write, read))
	section("A container without CUDA", "Beside runc's own shim.", plainTable(groups))
	section("Host memory beside GPU memory", "What the host memory adds to the same GPU memory alone, by gpuckpt, and where CRIU moves it by itself (bycriu); the rate is the host memory over that.", besideTable(groups))
	if r.GPUKind != "real" {
		section("What it costs", "Least squares over all runs without a disk: seconds = container + MiB · per MiB + (processes − 1) · per process. "+
			"The software GPU's copies say nothing about a real one's.", costTable(r.Runs))
	}
	section("Checkpoint images", "A checkpoint becomes an image in containerd, and a container of it goes on: by gpuckpt, its layers compressed or not, and by ctr with runc's shim and the CUDA steps by hand. "+
		"containerd is on a tmpfs, where a row does not say disk. A restore unpacks the image, ctr run finds it unpacked before; of ctr's own there is one restore, in both columns. The factor is over gpuckpt without compression; stored is by how much containerd's content store grew.", imageTable(r.ImageRuns))
	section("Checkpoint images on a disk", fmt.Sprintf("containerd is on the disk, which takes %.2f GB/s and gives %.2f GB/s (measured in the same call). The flush is until the image is on the disk for good; each restore begins with nothing of it in memory. gpuckpt restore unpacks the image: it reads it, and writes it again.", write/1e9, read/1e9), diskImageTable(r.ImageRuns, write, read))
	section("Several restores of one image", "ctr run of an image that is unpacked: one container, and several at once. The driver's is the longest of its steps. Memory is the most that the machine's available memory fell by.", manyTable(r.ManyRuns))
	section("A second checkpoint, and a registry", fmt.Sprintf("A program is left running, and writes to %g %% of its GPU memory between two checkpoints; both are pushed to a registry of the benchmark's own, on a loopback port of the same machine. "+
		"New and reused are bytes of GPU state as stored, when the image is made; reused on push are those that the registry had.", RewrittenPermille/10.0), sentTable(r.RegistryRuns))
	section("And back", "All of it is removed from containerd, and the second checkpoint pulled, which unpacks it; ctr run then has the program go on, verified bit by bit. Beside the first: containerd has the first checkpoint, and the second is pulled.", pullTable(r.RegistryRuns))
	section("While it arrives, on a node", "An image from a registry that sends so much a second over all connections, by gpuckpt alone, by ctr, and as a pod of a kubelet: these two pull the whole image first. Running is from the client's command, or from the pod's manifest, until the program answers.", wayTable(r.WayRuns))
	section("While it arrives", "The same image in one command, gpuckpt restore --pull, from a registry that sends so much a second over all connections: the restore begins with CRIU's images, and GPU state streams in behind. Running is until the program answers. The bytes alone are those over the limit, or over what the registry sends to a client that throws everything away, measured in the same call. The last column is the pull and the run above, one after the other.", arrivalTable(r.RegistryRuns))
	section("Many nodes at once", nodesText(r.NodesRuns), nodesTable(r.NodesRuns))
	section("Many more nodes", exampleText, exampleTable(r.NodesRuns))
	b.WriteString(r.limitText())
	b.WriteString(r.shortText())
	b.WriteString(r.troubleText())
	return b.String()
}

// header says what was measured on, and when.
func (r *Results) header() string {
	var b strings.Builder
	var versions []string
	for _, name := range []string{"criu", "containerd", "runc"} {
		if v := r.Versions[name]; v != "" {
			if number, ok := strings.CutPrefix(v, "Version: "); ok { // as criu says it
				v = name + " " + number
			}
			versions = append(versions, v)
		}
	}
	fmt.Fprintf(&b, "%d × %s (%s GPU), driver %s; %d CPUs, %s of memory; kernel %s, cgroup v%d. %s. Commit %s.\n",
		len(r.GPUs), r.Model(), r.GPUKind, r.Driver, r.CPUs, FormatSize(r.MemoryBytes), r.Kernel, r.CgroupVersion, strings.Join(versions, "; "), r.Commit)
	for _, c := range r.Calls {
		fmt.Fprintf(&b, "\n    %s  bench %s\n", c.Date, strings.Join(c.Args, " "))
	}
	return b.String()
}

func mainTable(groups []group) table {
	t := table{columns: []string{"case", "method", "runs", "checkpoint", "", "restore", "", "images", "memory, checkpoint", "memory, restore"}}
	for _, g := range groups {
		name := g.Shape.String()
		for _, m := range g.methods() {
			check, rest := g.of(m, checkpointSeconds), g.of(m, restoreSeconds)
			bytes := g.of(m, func(r Run) float64 { return float64(r.ImageBytes) })
			memory := func(i int) string {
				return RoundSize(g.of(m, func(r Run) float64 { return float64(operations[i].of(r).Memory.Used) }).Median)
			}
			t.add(name, m, fmt.Sprint(check.N), check.text(), times(check, g.of(Ours, checkpointSeconds)),
				rest.text(), times(rest, g.of(Ours, restoreSeconds)), RoundSize(bytes.Median), memory(0), memory(1))
			name = ""
		}
	}
	return t
}

// RoundSize is a number of bytes as text, in the largest unit of which there is one.
func RoundSize(bytes float64) string {
	if bytes >= 1<<30 {
		return fmt.Sprintf("%.2f GiB", bytes/(1<<30))
	}
	return fmt.Sprintf("%.1f MiB", bytes/(1<<20))
}

func shareTable(groups []group) table {
	t := table{columns: []string{"case", "operation", "whole", "driver", "all else", "explained"}}
	for _, g := range groups {
		if g.Content == ContentNone || len(g.runs[Ours]) == 0 {
			continue
		}
		for _, o := range operations {
			driver := g.of(Ours, func(r Run) float64 { return o.of(r).Driver })
			rest := g.of(Ours, func(r Run) float64 { return o.of(r).Seconds - o.of(r).Driver })
			t.add(g.Shape.String(), o.name, g.of(Ours, o.seconds).text(), driver.text(), rest.text(),
				fmt.Sprintf("%.1f %%", 100*g.of(Ours, func(r Run) float64 { return o.of(r).Covered }).Median))
		}
	}
	return t
}

// driverDown is the driver's share of the time for which a program that was
// left running stood still, in seconds: its checkpoint and its restore.
func driverDown(r Run) (s float64) {
	for _, p := range r.Checkpoint.Phases {
		if p.Name == "give GPU state back" {
			s += p.Took.Seconds()
		}
	}
	return s + r.Checkpoint.Driver
}

func downTable(groups []group) table {
	t := table{columns: []string{"case", "method", "down", "driver", "no answer for"}}
	for _, g := range groups {
		if g.Mode != ModeLeave {
			continue
		}
		for _, m := range g.methods() {
			driver := "–"
			if m == Ours && g.Content != ContentNone {
				driver = g.of(m, driverDown).text()
			}
			t.add(g.Shape.String(), m, g.of(m, func(r Run) float64 { return r.Checkpoint.Down }).text(), driver,
				g.of(m, func(r Run) float64 { return r.Checkpoint.Gap }).text())
		}
	}
	return t
}

func procsTable(groups []group) table {
	t := table{columns: []string{"case", "method", "checkpoint", "", "restore", ""}}
	for _, g := range groups {
		one := g.Shape
		one.Procs, one.GPUs = 1, 1
		single := find(groups, one)
		for _, m := range g.methods() {
			if g.Procs == 1 || len(single.runs[m]) == 0 {
				continue
			}
			check, rest := g.of(m, checkpointSeconds), g.of(m, restoreSeconds)
			t.add(g.Shape.String(), m, check.text(), times(check, single.of(m, checkpointSeconds)), rest.text(), times(rest, single.of(m, restoreSeconds)))
		}
	}
	return t
}

func diskTable(groups []group, write, read float64) table {
	t := table{columns: []string{"case", "method", "operation", "time", "bound", "factor", "flush"}}
	for _, g := range groups {
		if g.Media != OnDisk || g.Content == ContentNone || write == 0 || read == 0 {
			continue
		}
		memory := g.Shape
		memory.Media = OnTmpfs
		for _, m := range g.methods() {
			for _, o := range operations {
				rate := write
				if o.name == "restore" {
					rate = read
				}
				bound := g.of(m, func(r Run) float64 { return float64(r.ImageBytes) / rate })
				if quick := find(groups, memory).of(m, o.seconds); quick.Median > bound.Median {
					bound = quick
				}
				flush := "–"
				if o.name == "checkpoint" {
					flush = g.of(m, func(r Run) float64 { return r.Flush }).text()
				}
				took := g.of(m, o.seconds)
				t.add(g.Shape.String(), m, o.name, took.text(), Seconds(bound.Median), times(took, bound), flush)
			}
		}
	}
	return t
}

func plainTable(groups []group) table {
	t := table{columns: []string{"case", "operation", "ours", "stock", "ours over stock"}}
	for _, g := range groups {
		if g.Content != ContentNone {
			continue
		}
		for _, o := range operations {
			a, b := g.of(Ours, o.seconds), g.of(Stock, o.seconds)
			t.add(g.Shape.String(), o.name, a.text(), b.text(), times(a, b))
		}
	}
	return t
}

// besideTable says what host memory adds to the GPU memory that it is beside.
func besideTable(groups []group) table {
	t := table{columns: []string{"case", "method", "operation", "whole", "without it", "more", "rate"}}
	for _, g := range groups {
		if g.Content == ContentNone || g.Host == 0 {
			continue
		}
		alone := g.Shape
		alone.Host, alone.HostKind = 0, ""
		base := find(groups, alone)
		for _, m := range g.methods() {
			same := m
			if len(base.runs[m]) == 0 { // what is left of it without host memory is ours
				same = Ours
			}
			for _, o := range operations {
				whole, without := g.of(m, o.seconds), base.of(same, o.seconds)
				if without.N == 0 {
					continue
				}
				more, rate := whole.Median-without.Median, "–"
				if more > 0 {
					rate = fmt.Sprintf("%.1f GB/s", float64(g.Host)/more/1e9)
				}
				t.add(g.Shape.String(), m, o.name, whole.text(), without.text(), fmt.Sprintf("%+.2f s", more), rate)
			}
		}
	}
	return t
}

// costTable fits what a checkpoint and a restore are made of.
func costTable(runs []Run) table {
	t := table{columns: []string{"method", "operation", "container", "per GiB", "per further process"}}
	for _, m := range []string{Ours, CRIUPlugin, Stock} {
		for _, o := range operations {
			var points []point
			for _, r := range runs {
				if r.Verified && r.Method == m && r.Media == OnTmpfs && r.Content != ContentNone {
					points = append(points, point{mib: float64(r.Bytes()) / (1 << 20), procs: r.Procs, seconds: o.seconds(r)})
				}
			}
			if c, err := fitCost(points); err == nil {
				t.add(m, o.name, fmt.Sprintf("%.0f ms", 1e3*c.Container), fmt.Sprintf("%.0f ms", 1e3*c.PerMiB*1024), fmt.Sprintf("%.0f ms", 1e3*c.PerProcess))
			}
		}
	}
	return t
}

// limitText tells of the container with a memory limit.
func (r *Results) limitText() string {
	l := r.Limit
	if l == nil {
		return ""
	}
	our := "failed: " + firstLine(l.Ours.Error)
	if l.Ours.Verified {
		our = fmt.Sprintf("checkpoint %s, restore %s, verified; its cgroup was charged with %s at most",
			Seconds(l.Ours.Checkpoint.Seconds), Seconds(l.Ours.Restore.Seconds), RoundSize(float64(l.Ours.Checkpoint.CgroupPeak)))
	}
	fate := "lived"
	if l.Stock.killed() {
		fate = "was killed for its memory (OOM event, exit code 137)"
	} else if l.Stock.ExitCode >= 0 {
		fate = fmt.Sprintf("ended with %d", l.Stock.ExitCode)
	}
	said := ""
	if l.Stock.Error != "" {
		said = "; the step answered: " + firstLine(l.Stock.Error)
	}
	return fmt.Sprintf("\n## A memory limit below the GPU memory\n\n%s of GPU memory in a container limited to %s.\n\n- ours: %s\n- stock: the container %s%s\n",
		FormatSize(l.Size), FormatSize(l.Limit), our, fate, said)
}

// troubleText lists the runs that failed and those that were not made.
func (r *Results) troubleText() string {
	var lines []string
	for _, m := range r.Runs {
		if !m.Verified {
			lines = append(lines, fmt.Sprintf("- failed: %s, %s, round %d: %s", m.Shape, m.Method, m.Round, firstLine(m.Error)))
		}
	}
	for _, m := range r.ImageRuns {
		if !m.Verified {
			lines = append(lines, fmt.Sprintf("- failed: %s: %s", m.Name(), firstLine(m.Error)))
		}
	}
	for _, m := range r.RegistryRuns {
		if !m.Verified {
			lines = append(lines, fmt.Sprintf("- failed: %s: %s", m.Name(), firstLine(m.Error)))
		}
	}
	for _, m := range r.ManyRuns {
		if !m.Verified {
			lines = append(lines, fmt.Sprintf("- failed: %s: %s", m.Name(), firstLine(m.Error)))
		}
	}
	for _, m := range r.WayRuns {
		if !m.Verified {
			lines = append(lines, fmt.Sprintf("- failed: %s: %s", m.Name(), firstLine(m.Error)))
		}
	}
	for _, m := range r.NodesRuns {
		if !m.Verified {
			lines = append(lines, fmt.Sprintf("- failed: %s: %s", m.Name(), firstLine(m.Error)))
		}
	}
	for _, c := range r.Calls {
		for _, n := range c.NotRun {
			lines = append(lines, "- not run: "+n)
		}
	}
	if len(lines) == 0 {
		return ""
	}
	return "\n## Failed or not run\n\n" + strings.Join(slices.Compact(lines), "\n") + "\n"
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
