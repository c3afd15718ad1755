// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

var (
	session *harness.Session
	shared  *harness.Containerd
	steered *control
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) error {
		session = s
		var err error
		if steered, err = listen(); err != nil {
			return err
		}
		s.AtEnd(steered.close)
		bins, err := s.Bins.WithFaults()
		if err != nil {
			return err
		}
		shared, err = s.Start(harness.Options{Bins: bins, Env: []string{"GPUCKPT_FAULTS=" + steered.path}})
		if err == nil && s.GPU.Kind == harness.SoftwareGPU {
			err = shared.SetSoftwareGPU(slowMover)
		}
		if err == nil {
			err = smallDisks()
		}
		if err == nil {
			err = shared.ImportWorkload(s.Context())
		}
		return err
	})
}

// Directories of the containerd, each with a small file system of its own, so that it can be filled up.
func bundles() string { return filepath.Dir(filepath.Dir(shared.Bundle("any"))) }
func roots() string {
	return filepath.Join(shared.Dir(), "root", "io.containerd.snapshotter.v1."+shared.Snapshotter(), "snapshots")
}

func contents() string {
	return filepath.Join(shared.Dir(), "root", "io.containerd.content.v1.content")
}

// smallDisks mounts them. They go with the containerd.
func smallDisks() error {
	images := "256m"
	if session.GPU.Kind == harness.RealGPU {
		images = "4g"
	}
	for dir, size := range map[string]string{bundles(): "32m", roots(): images, contents(): images, shared.Records(): "1m"} {
		err := os.MkdirAll(dir, 0o711) //nolint:gosec // as containerd's own directories
		if err == nil {
			err = unix.Mount("tmpfs", dir, "tmpfs", 0, "mode=711,size="+size)
		}
		if err == nil && dir == contents() { // which is there when containerd has started
			err = os.Mkdir(filepath.Join(dir, "ingest"), 0o700)
		}
		if err != nil {
			return fmt.Errorf("mount a small disk at %s: %w", dir, err)
		}
	}
	return nil
}

// The variables that choose among the cells.
const (
	// envCells is how many cells are tried: a number, the numbers of the first and of the one after
	// the last ("100-200"), a regular expression for their names, or "all".
	envCells = "GPUCKPT_TEST_FAULTS"
	// envBudget is how long, "240s".
	envBudget = "GPUCKPT_TEST_BUDGET"
	// envPart is a part of those cells, "2/3" for the second of three.
	envPart = "GPUCKPT_TEST_FAULTS_PART"
	// envLanes is how many containers are used at once.
	envLanes = "GPUCKPT_TEST_FAULTS_LANES"
	// envWalk names a file that each cell is written into when it has been tried. Cells that it has
	// as passed with the same programs are left out, so a walk goes on where it was cut off.
	envWalk = "GPUCKPT_TEST_FAULTS_WALK"
	// envKnown names the log of an earlier walk. Cells that passed in it when they were last tried are
	// left out, whatever programs it was of, before the parts are made.
	envKnown = "GPUCKPT_TEST_FAULTS_KNOWN"
)

// sample is how many cells of each way are tried where nobody says how many, and mended are cells that are
// tried then as well: a walk has found them wrong.
var (
	sample = map[Way]int{Steered: 8, Kept: 2, Driver: 1, Window: 1, Other: 1}
	mended = []string{"restore/note/begin/no-files", "checkpoint-window/save GPU state/begin/block-writes"}
)

// choose returns the cells to try, in an order in which any first part is spread over all of them,
// and those that have the node for themselves last.
func choose(t *testing.T) []Cell {
	cells := slices.DeleteFunc(Cells(), func(c Cell) bool { return c.Fault.SoftwareOnly && session.GPU.Kind != harness.SoftwareGPU })
	slices.SortFunc(cells, func(x, y Cell) int { return cmp.Compare(rank(x), rank(y)) })
	switch want := os.Getenv(envCells); want {
	case "all":
	case "":
		left := maps.Clone(sample)
		cells = slices.DeleteFunc(cells, func(c Cell) bool {
			left[c.Place.Scenario.Way]--
			return left[c.Place.Scenario.Way] < 0 && !slices.Contains(mended, c.String())
		})
	default:
		var first, last int
		if n, _ := fmt.Sscanf(want, "%d-%d", &first, &last); n == 1 {
			first, last = 0, first
		} else if n == 0 {
			named, err := regexp.Compile(want)
			if err != nil {
				t.Fatalf("%s=%s: %v", envCells, want, err)
			}
			cells = slices.DeleteFunc(cells, func(c Cell) bool { return !named.MatchString(c.String()) })
			break
		}
		cells = cells[min(first, len(cells)):min(max(first, last), len(cells))]
	}
	if path := os.Getenv(envKnown); path != "" {
		f, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		all, err := ReadWalk(f)
		if err != nil {
			t.Fatalf("%s=%s: %v", envKnown, path, err)
		}
		cells = Unknown(cells, all)
	}
	if part := os.Getenv(envPart); part != "" {
		var k, n int
		if _, err := fmt.Sscanf(part, "%d/%d", &k, &n); err != nil || k < 1 || k > n {
			t.Fatalf("%s=%s is no part such as 2/3", envPart, part)
		}
		first := 0
		cells = slices.DeleteFunc(cells, func(Cell) bool { first++; return (first-1)%n != k-1 })
	}
	return cells
}

// rank spreads cells.
func rank(c Cell) uint32 {
	h := fnv.New32a()
	h.Write([]byte(c.String()))
	return h.Sum32()
}

// Each fault is made at each place, and what is left is looked at.
func TestFaults(t *testing.T) {
	session.Results.Add(t)
	walk := openWalk(t)
	cells := walk.left(choose(t))
	var end time.Time
	if text := os.Getenv(envBudget); text != "" {
		budget, err := time.ParseDuration(text)
		if err != nil {
			t.Fatal(err)
		}
		end = time.Now().Add(budget)
	}
	var tried, wrong atomic.Int64
	var lanes sync.WaitGroup
	// tryAll has lanes try cells beside each other, in their order.
	tryAll := func(cells []Cell, all []*lane) {
		work := make(chan Cell)
		go func() {
			defer close(work)
			for _, c := range cells {
				if session.Context().Err() != nil || !end.IsZero() && time.Now().After(end) {
					return
				}
				work <- c
			}
		}()
		for _, l := range all {
			lanes.Go(func() {
				for c := range work {
					began := time.Now()
					ok := t.Run(c.String(), func(t *testing.T) {
						session.Results.Add(t)
						tried.Add(1)
						l.try(t, c)
					})
					if l.lost {
						t.Errorf("%s cannot be started anew: its walk ends", l.k.ID)
						return
					}
					walk.note(t, c, ok, time.Since(began))
					if !ok {
						wrong.Add(1)
						l.broken = true
					}
				}
			})
		}
	}
	byWay := make(map[Way][]Cell)
	for _, c := range cells {
		byWay[c.Place.Scenario.Way] = append(byWay[c.Place.Scenario.Way], c)
	}
	for _, way := range []Way{Driver, Window, Other} { // which the node's configuration decides, or all GPUs
		if len(byWay[way]) == 0 {
			continue
		}
		undo := shared.Configured(t, shared.Staging(way.cgroup(), configs[way]))
		l := newLane(t, fmt.Sprintf("lane-%d-%s", rounds, strings.Fields(string(way))[0]), way)
		tryAll(byWay[way], []*lane{l})
		lanes.Wait()
		if err := shared.Remove(t.Context(), l.k.ID); err != nil {
			t.Error(err)
		}
		undo()
	}
	// All are there before the first fault, which may be one of all containers.
	var all, keeping []*lane
	for n := range lanesAtOnce(t) {
		all = append(all, newLane(t, fmt.Sprintf("lane-%d-%d", rounds, n), Steered))
	}
	if len(byWay[Kept]) > 0 {
		keeping = append(keeping, newLane(t, fmt.Sprintf("lane-%d-kept", rounds), Kept))
	}
	rounds++
	tryAll(byWay[Kept], keeping)
	tryAll(byWay[Steered], all)
	lanes.Wait()
	for _, p := range steered.unknown() {
		t.Errorf("the table lacks the step %q of the operation %q, of which there is the %s", p.Step, p.Operation, p.Moment)
	}
	points, faults := make(map[string]bool), make(map[string]bool)
	for _, c := range cells {
		points[c.Place.String()], faults[c.Fault.Name] = true, true
	}
	fmt.Printf("points x faults: %d of %d cells tried, %d points x %d faults, %d violations\n",
		tried.Load(), len(Cells()), len(points), len(faults), wrong.Load())
}

// configs are the settings of [staging] with which GPU memory goes a way.
var configs = map[Way]string{Driver: "steer = false", Window: "memory_limit = 50_331_648\nwhen_short = \"write-through\""}

// cgroup is that of [staging]: a limit of it outlives the setting.
func (w Way) cgroup() string {
	if w == Window {
		return "window"
	}
	return "staging"
}

// lanesAtOnce is how many containers are used at once.
func lanesAtOnce(t *testing.T) int {
	text := os.Getenv(envLanes)
	if text == "" {
		return min(6, max(2, runtime.NumCPU()))
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("%s=%s is no number of containers", envLanes, text)
	}
	return n
}

// rounds counts the runs of TestFaults: go test -count.
var rounds int

// turns has faults that touch all containers wait for their turn.
var turns sync.RWMutex

// try makes a fault at a place and looks.
func (l *lane) try(t testing.TB, c Cell) {
	if c.Fault.Alone || c.Place.Scenario.InTurn {
		turns.Lock()
		defer turns.Unlock()
	} else {
		turns.RLock()
		defer turns.RUnlock()
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Log(l.log())
		}
	})
	if l.broken {
		l.lost = true
		_ = shared.Remove(t.Context(), l.k.ID)
		next := newLane(t, fmt.Sprintf("%s-%d", strings.SplitN(l.k.ID, "-again", 2)[0]+"-again", l.life+1), l.way)
		next.life = l.life + 1
		*l = *next
	}
	l.up(t)
	s := c.Place.Scenario
	if s.InTurn {
		defer shared.Configured(t, shared.Staging("turns", fmt.Sprintf("memory_limit = %d", turnLimit())))()
	}
	if s.Operation == Command {
		l.tryCommand(t, c)
		return
	}
	hooked := strings.HasPrefix(c.Fault.Name, "hook-")
	if hooked && s.Operation != "restore" {
		l.hook(t, c)
		l.again(t)
	}
	before := l.look(t)
	l.disk = nil
	if strings.HasPrefix(c.Fault.Name, "block-") {
		l.disk = newDisk(t)
	}
	spill := ""
	switch {
	case l.disk != nil && strings.HasSuffix(s.Name, "-spill"):
		spill = filepath.Join(l.disk.Dir, "spill")
		if err := os.Mkdir(spill, 0o700); err != nil {
			t.Fatal(err)
		}
	case c.Fault.Name == "spill-disk-full":
		spill = harness.SmallDisk(t, "8m")
	case strings.HasSuffix(s.Name, "-spill"):
		spill = harness.DiskDir(t)
	}
	l.spill = spill
	switch s.Operation {
	case "restore":
		dir := l.dirOfCell()
		if err := l.checkpoint(t.Context(), shared.Client(), dir, true); err != nil {
			t.Fatal(err)
		}
		l.good(t, dir)
		l.gone(t)
		if hooked {
			l.hook(t, c)
		}
	case "resume":
		if err := l.suspend(t.Context(), shared.Client(), spill); err != nil {
			t.Fatal(err)
		}
	}
	if s.Paused {
		if err := l.pause(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	dir := l.dirOfCell()
	h := l.make(t, c, func(ctx context.Context, c *client.Client) error {
		switch s.Operation {
		case "checkpoint":
			return l.checkpoint(ctx, c, dir, s.Stops)
		case "restore":
			return l.restore(ctx, c, l.last)
		case "suspend":
			return l.suspend(ctx, c, spill)
		case "resume":
			return l.resume(ctx, c)
		}
		panic(s.Operation)
	})
	if hooked {
		l.hook(t, Cell{})
	}
	l.judge(t, c, h, before, dir)
	if hooked && s.Operation != "restore" {
		l.again(t)
	}
	if l.disk != nil {
		l.up(t)
		l.cycle(t) // to have the last checkpoint elsewhere
		l.disk.judge(t, c, h, dir)
		return
	}
	if dir != l.last { // else the small disk of a long walk is full at last
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	}
	if spill != "" {
		within(t, "the spilled state is removed", func() error {
			if left := names(spill); len(left) > 0 {
				return fmt.Errorf("%q is left", left)
			}
			return nil
		})
	}
	if status, err := l.k.Status(t.Context()); err == nil && status == client.Running {
		l.cycle(t)
	}
}

// judge looks at what a fault has left, and lets the container go on.
func (l *lane) judge(t testing.TB, c Cell, h *hit, before look, dir string) {
	t.Helper()
	t.Logf("the operation's error: %v", h.err)
	if inWorker[c.Fault.Name] != "" && !h.broke.Load() {
		t.Error("no worker has read or written anything")
	}
	if strings.HasPrefix(c.Fault.Name, "hang-") && h.err != nil && !regexp.MustCompile("longer than|hangs|did nothing|killed|deadline").MatchString(h.err.Error()) {
		t.Errorf("the error does not say what hung: %v", h.err)
	}
	if says := map[string]string{"hook-fails": "status 3", "hook-hangs": "longer than 300ms", "spill-disk-full": "no space left", hangDriver: "nothing has moved for 1.5s"}[c.Fault.Name]; says != "" && h.err != nil && !strings.Contains(h.err.Error(), says) {
		t.Errorf("the error does not say %q: %v", says, h.err)
	}
	if c.Fault.Name == recordsFull && c.Place.first() && c.Outcome == Back && (h.err == nil || !strings.Contains(h.err.Error(), "no space left")) {
		t.Errorf("the operation has no record, and its error is %v", h.err)
	}
	if h.missed.Load() {
		t.Log("the process was not there, or gone before it was hit")
		c.Outcome |= Through
	}
	if !h.reached.Load() {
		t.Fatalf("the place was not reached; the operation's error: %v", h.err)
	}
	if c.Outcome == Ends {
		h.over.Store(true)
		if status, err := l.k.Status(t.Context()); err == nil && status == client.Paused {
			// A process that was killed in a frozen cgroup of version 1 ends when it is thawed.
			if err := l.kill(t.Context()); err != nil {
				t.Error(err)
			}
		}
		l.gone(t)
		return
	}
	op := c.Place.Scenario.Operation
	if op == "restore" {
		l.shim = h.at.Pid
	}
	// Where the client is gone, the shim may still be at work.
	var status client.ProcessStatus
	within(t, "the operation is over", func() error {
		if h.working() {
			return errors.New("the shim is at work")
		}
		status, _ = l.k.Status(t.Context()) // there is none after a restore that failed
		if op == "restore" && status == client.Running {
			l.found(t)
		}
		if pids := helpers(l.shim); len(pids) > 0 && (status != client.Paused || c.Outcome&Retry == 0) {
			return fmt.Errorf("the shim has %s", describe(pids))
		}
		return nil
	})
	h.over.Store(true)
	through := h.err == nil
	if h.clientLeft() && c.Place.After == "" { // who is not told: the shim goes on, or has undone it
		through = through || op == "suspend" && status == client.Paused || op == "resume" && status == client.Running
	}
	if through && c.Outcome&Through == 0 {
		t.Errorf("the operation succeeded")
	}
	if !through && c.Outcome&(Back|Retry) == 0 {
		t.Errorf("the operation failed: %v", h.err)
	}
	switch op {
	case "checkpoint":
		_, err := images.ReadMetadata(dir)
		complete := err == nil
		if through && !complete {
			t.Errorf("the checkpoint is not complete: %v", err)
		}
		stops := c.Place.Scenario.Stops && complete
		// A containerd that begins meanwhile forgets a task that has ended.
		if status == client.Stopped || status == "" && stops { // it was to end with the checkpoint
			if !stops {
				t.Fatalf("the container has ended, and the checkpoint is not complete: %v", err)
			}
			l.good(t, dir)
			l.gone(t)
			l.up(t)
			return
		}
		if !complete && c.Outcome&Retry == 0 {
			if left := names(dir); len(left) > 0 && l.disk == nil {
				t.Errorf("files of the checkpoint are left: %q", left)
			}
		}
	case "restore":
		if !through && status != client.Running {
			l.gone(t)
			return
		}
	case "suspend":
		if through && (c.Fault.Name != "resume" || status != client.Running) {
			if status != client.Paused {
				t.Errorf("the container is %s, want it suspended", status)
			}
			if err := l.resume(t.Context(), shared.Client()); err != nil {
				t.Fatal(err)
			}
		}
	case "resume":
		if !through {
			if status != client.Paused && c.Outcome&Retry == 0 {
				t.Errorf("the container is %s, want it suspended as it was", status)
			}
			if status == client.Paused && c.Outcome&Retry == 0 {
				if err := l.resume(t.Context(), shared.Client()); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if status, err := l.k.Status(t.Context()); err != nil || status == client.Paused {
		if c.Outcome&Retry == 0 && !c.Place.Scenario.Paused {
			t.Errorf("the container is %s, error %v; want it to run", status, err)
		}
		if err := l.resumeByHand(t.Context()); err != nil {
			t.Fatal(err)
		}
	} else if c.Place.Scenario.Paused && c.Fault.Name != "resume" {
		t.Errorf("the container is %s, want it paused as it was", status)
	} else if !through && c.Outcome&Retry != 0 && op != "restore" {
		_ = l.resumeByHand(t.Context()) // it runs, and its calls of the driver may be blocked
	}
	if op == "restore" {
		l.found(t)
	} else {
		l.asBefore(t, before)
	}
	l.counts(t)
	l.execs(t)
}
