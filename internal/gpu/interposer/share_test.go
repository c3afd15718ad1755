// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build amd64

package interposer

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/freeport"
)

// ways are CUDA IPC of cuMemAlloc, a descriptor of cuMemCreate, and the first with events.
var ways = []string{"large", "handles", "events"}

// rank is one of two processes that share GPU memory by their interposers.
type rank struct {
	t    *testing.T
	pid  int
	conn net.Conn
}

func (r rank) says(request, want string) {
	r.t.Helper()
	if got := r.asked(request); want != "" && got != want {
		r.t.Fatalf("%q: %q, want %q", request, got, want)
	}
}

// asked returns what it answers.
func (r rank) asked(request string) string {
	r.t.Helper()
	buf := make([]byte, 2048)
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		r.conn.SetDeadline(time.Now().Add(10 * time.Second))
		n := 0
		_, err := r.conn.Write([]byte(request))
		if err == nil {
			n, err = r.conn.Read(buf)
		}
		if err != nil && time.Since(began) < 10*time.Second {
			continue // it is not there yet
		}
		if err != nil {
			r.t.Fatalf("%q: %v", request, err)
		}
		return strings.TrimRight(string(buf[:n]), "\x00\n")
	}
}

// process is the rank as who parks it knows it.
func (r rank) process() cuda.Process { return cuda.Process{PID: cuda.PID{Host: r.pid, NS: r.pid}} }

// imported reports whether the rank has memory of the other one mapped.
func (r rank) imported() bool {
	r.t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", r.pid))
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if strings.Contains(line, "rwxs") && strings.Contains(line, "softcuda") {
			return true
		}
	}
	return false
}

// maps reports whether the rank has a file mapped whose name has a text in it.
func (r rank) maps(text string) bool {
	r.t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", r.pid))
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.Contains(string(maps), text)
}

// takesTurns waits until the rank has had some turns more with the other one's events, all of them right. Every eighth
// has a new event.
func (r rank) takesTurns() {
	r.t.Helper()
	first := r.turns()
	for began := time.Now(); r.turns() < first+20; time.Sleep(time.Millisecond) {
		if time.Since(began) > 10*time.Second {
			r.t.Fatal("the two take no turns any more")
		}
	}
}

func (r rank) turns() (n int) {
	r.t.Helper()
	wrong := 0
	if _, err := fmt.Sscanf(r.asked("turns"), "turns=%d wrong=%d", &n, &wrong); err != nil || wrong != 0 {
		r.t.Fatalf("%d of %d turns are wrong: %v", wrong, n, err)
	}
	return n
}

// pair starts two processes of which the second has memory of the first one mapped.
func pair(t *testing.T, dir, way string) (exporter, importer rank) {
	t.Helper()
	exporter, importer = starting(t, dir, way)
	importer.says("", "102")
	return exporter, importer
}

// starting starts them, and returns when the first one is there.
func starting(t *testing.T, dir, way string, env ...string) (exporter, importer rank) {
	t.Helper()
	var conns []net.Conn
	port, err := freeport.Row(2)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		conn, err := net.Dial("udp", fmt.Sprintf("127.0.0.1:%d", port+i))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		conns = append(conns, conn)
	}
	bytes := "8M"
	if alone, is := strings.CutSuffix(way, " alone"); is { // the memory is the driver's
		way, bytes = alone, "1M"
	}
	cmd := exec.Command(filepath.Join(dir, "gpuwork"), "ipc", "--share", way, "--bytes", bytes, "--port", strconv.Itoa(port))
	cmd.Env = append(os.Environ(), environment(dir)...)
	cmd.Env = append(cmd.Env, env...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	t.Cleanup(func() {
		if importer.pid != 0 {
			unix.Kill(importer.pid, unix.SIGKILL)
		}
	})
	exporter = rank{t, cmd.Process.Pid, conns[0]}
	exporter.says("", "101")
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", exporter.pid, exporter.pid))
	if err != nil {
		t.Fatal(err)
	}
	child, err := strconv.Atoi(strings.TrimSpace(string(children)))
	if err != nil {
		t.Fatal(err)
	}
	return exporter, rank{t, child, conns[1]}
}

// Memory that two processes share is taken down when they are parked and there again when they
// go on, at the same addresses and with what is in it: also after it was saved and made anew.
func TestShared(t *testing.T) {
	for _, way := range ways {
		t.Run(way, func(t *testing.T) { testShared(t, way) })
	}
}

func testShared(t *testing.T, way string) {
	t.Helper()
	exporter, importer := pair(t, build(t), way)
	importer.says("verify", "bad=0")
	both := cuda.Group{exporter.process(), importer.process()}
	exporters := map[bool]int{false: 1, true: 2}[way == "events"] // each has an event for the other one
	next := 103
	count := func() {
		t.Helper()
		exporter.says("", strconv.Itoa(next))
		importer.says("", strconv.Itoa(next+1))
		importer.says("verify", "bad=0")
		exporter.says("verify", "bad=0")
		next += 2
	}
	for _, save := range []bool{false, true, true} {
		p, err := Park(t.Context(), both, time.Minute)
		if err != nil || p.Refusal() != nil || p.Bytes != 8<<20 || len(p.all) != exporters {
			t.Fatalf("parked %+v: %v", p, err)
		}
		if importer.imported() {
			t.Error("the memory is mapped still")
		}
		sockets, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/unix", exporter.pid))
		if err != nil || strings.Contains(string(sockets), "@gpuckpt-interposer-") {
			t.Errorf("the exporter has its socket still: %v", err)
		}
		if err := p.LeaveToDriver(true); err == nil {
			t.Error("memory that is shared was left to the driver")
		}
		if save {
			if err := step(t.Context(), p.all, "save", askSave); err != nil {
				t.Fatal(err)
			}
		}
		for _, r := range []rank{exporter, importer} {
			if r.maps("gpuckpt-events") || r.maps("cuda.shm.") {
				t.Error("something of an event is mapped still")
			}
		}
		if err := Open(t.Context(), both); err != nil {
			t.Fatal(err)
		}
		if !importer.imported() {
			t.Error("the memory is not mapped again")
		}
		if way == "events" {
			exporter.takesTurns()
			if !exporter.maps("gpuckpt-events") || exporter.maps("cuda.shm.") {
				t.Error("the events are not the interposer's")
			}
		}
		count()
	}
}

// Processes that share events, and no memory of their interposers', are parked as well, until they go on.
func TestSharedEventsAlone(t *testing.T) {
	exporter, importer := pair(t, build(t), "events alone")
	both := cuda.Group{exporter.process(), importer.process()}
	for range 3 {
		exporter.takesTurns()
		p, err := Park(t.Context(), both, time.Minute)
		if err != nil || p == nil || len(p.all) != 2 || p.Bytes != 0 {
			t.Fatalf("parked %+v: %v", p, err)
		}
		if err := p.LeaveToDriver(true); err != nil { // there is nothing to leave
			t.Error(err)
		}
		for _, r := range []rank{exporter, importer} {
			if r.maps("gpuckpt-events") {
				t.Error("words are mapped still")
			}
		}
		if err := Open(t.Context(), both); err != nil {
			t.Fatal(err)
		}
	}
	exporter.takesTurns()
}

// Whoever took the sharing down may die at each step: Open is the way back from there.
func TestSharedHalfWay(t *testing.T) {
	for _, way := range ways {
		exporter, importer := pair(t, build(t), way)
		both := cuda.Group{exporter.process(), importer.process()}
		next := 103
		for _, steps := range [][]uint32{{}, {askLeave}, {askLeave, askRest}, {askLeave, askRest, askWake}} {
			all, err := of(both)
			if err != nil {
				t.Fatal(err)
			}
			if err := inAll(all, func(c *Interposer) error {
				if err := c.process.access(c.at+offCut, []byte{1, 2, 3, 4, 5, 6, 7, 8}, true); err != nil {
					return err
				}
				_, err := c.ask(t.Context(), "park", askPark, within(time.Second), time.Minute)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			for _, what := range steps {
				if err := step(t.Context(), all, "take a step with", what); err != nil {
					t.Fatal(err)
				}
			}
			if err := Open(t.Context(), both); err != nil {
				t.Fatalf("%s, after %v: %v", way, steps, err)
			}
			exporter.says("", strconv.Itoa(next))
			importer.says("", strconv.Itoa(next+1))
			importer.says("verify", "bad=0")
			next += 2
		}
	}
}

// What cannot be taken down stays as it is, and is refused.
func TestSharedRefused(t *testing.T) {
	for _, way := range ways {
		t.Run(way, func(t *testing.T) { testSharedRefused(t, way) })
	}
}

func testSharedRefused(t *testing.T, way string) {
	t.Helper()
	exporter, importer := pair(t, build(t), way)
	next := 103
	for name, procs := range map[string]cuda.Group{
		"the importer is not parked": {exporter.process()},
		"the exporter is not parked": {importer.process()},
	} {
		p, err := Park(t.Context(), procs, time.Minute)
		if !errors.Is(err, errElsewhere) || !errors.Is(p.Refusal(), errElsewhere) {
			t.Errorf("%s: %+v, %v", name, p, err)
		}
		if !importer.imported() {
			t.Errorf("%s: the memory is not mapped", name)
		}
		exporter.says("", strconv.Itoa(next))
		importer.says("", strconv.Itoa(next+1))
		importer.says("verify", "bad=0")
		next += 2
	}
	var none *Parked
	if err := none.Refusal(); err != nil {
		t.Error(err)
	}
}

// An importer that ends is missed, and an exporter that ends while they are parked takes its memory with it:
// a restore says so, and otherwise the importer goes on until it uses it.
func TestSharedWithTheDead(t *testing.T) {
	for _, way := range ways {
		t.Run(way, func(t *testing.T) { testSharedWithTheDead(t, way) })
	}
}

func testSharedWithTheDead(t *testing.T, way string) {
	t.Helper()
	dir := build(t)
	kill := func(r rank) {
		t.Helper()
		if err := unix.Kill(r.pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		for { // a zombie, which is later than its memory's end
			if stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.pid)); err != nil || strings.Contains(string(stat), ") Z ") {
				return
			}
			time.Sleep(time.Millisecond)
		}
	}
	t.Run("importer", func(t *testing.T) {
		exporter, importer := pair(t, dir, way)
		kill(importer)
		procs := cuda.Group{exporter.process()}
		if p, err := Park(t.Context(), procs, time.Minute); err != nil || p.Refusal() != nil {
			t.Fatalf("%+v, %v", p, err)
		}
		if err := Open(t.Context(), procs); err != nil {
			t.Fatal(err)
		}
		exporter.says("", "103")
	})
	t.Run("importer that is parked", func(t *testing.T) {
		exporter, importer := pair(t, dir, way)
		both := cuda.Group{exporter.process(), importer.process()}
		if _, err := Park(t.Context(), both, time.Minute); err != nil {
			t.Fatal(err)
		}
		all, err := of(both)
		if err != nil {
			t.Fatal(err)
		}
		kill(importer)
		if err := openAll(context.Background(), all, nil); err != nil {
			t.Error(err)
		}
		exporter.says("", "103")
	})
	t.Run("exporter", func(t *testing.T) {
		exporter, importer := pair(t, dir, way)
		if _, err := Park(t.Context(), cuda.Group{exporter.process(), importer.process()}, time.Minute); err != nil {
			t.Fatal(err)
		}
		c, err := Find(importer.pid)
		if err != nil {
			t.Fatal(err)
		}
		kill(exporter)
		if err := openAll(context.Background(), []*Interposer{c}, func(context.Context, int, uint64, uint64) []cuda.Memory { return nil }); !errors.Is(err, errGone) {
			t.Errorf("got %v", err)
		}
		if err := openAll(context.Background(), []*Interposer{c}, nil); err != nil {
			t.Error(err)
		}
		if way != "events" { // whose next turn fails
			importer.says("pid", strconv.Itoa(importer.pid))
		}
	})
}

// An importer that asks for memory while its exporter is parked waits for it, however long it is stopped itself.
func TestSharedLater(t *testing.T) {
	for _, way := range ways {
		exporter, importer := starting(t, build(t), way, "SOFTCUDA_CONTEXT_DELAY_MS=300")
		procs := cuda.Group{exporter.process()}
		if _, err := Park(t.Context(), procs, time.Minute); err != nil {
			t.Fatal(err)
		}
		importer.asks()
		importer.stops()
		if err := Open(t.Context(), procs); err != nil {
			t.Fatal(err)
		}
		importer.says("", "102")
		exporter.says("", "103")
		both := append(procs, importer.process())
		if p, err := Park(t.Context(), both, time.Minute); err != nil || p.Refusal() != nil {
			t.Fatalf("%+v, %v", p, err)
		}
		if err := Open(t.Context(), both); err != nil {
			t.Fatal(err)
		}
		importer.says("", "104")
	}
}

// The same while its exporter is stopped with the question.
func TestSharedStopped(t *testing.T) {
	for _, way := range ways {
		exporter, importer := starting(t, build(t), way, "SOFTCUDA_CONTEXT_DELAY_MS=300")
		if err := unix.Kill(exporter.pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		importer.asks()
		importer.stops()
		if err := unix.Kill(exporter.pid, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		importer.says("", "102")
		exporter.says("", "103")
	}
}

// Processes that share have all of the time to be parked in: the driver cannot have them.
func TestSharedIsWaitedFor(t *testing.T) {
	exporter, importer := pair(t, build(t), ways[0])
	if err := unix.Kill(importer.pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	procs, timeout := cuda.Group{exporter.process(), importer.process()}, 8*time.Second
	done := make(chan error, 1)
	go func() {
		p, err := Park(t.Context(), procs, timeout)
		done <- errors.Join(err, p.Refusal())
	}()
	select {
	case err := <-done:
		t.Errorf("after less than %v: %v", timeout, err)
	case <-time.After(timeout/2 + 500*time.Millisecond):
	}
	if err := unix.Kill(importer.pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := Open(t.Context(), procs); err != nil {
		t.Fatal(err)
	}
}

// A process that imports memory after the others were looked for, and before all are parked, is parked as well.
func TestSharedMeanwhile(t *testing.T) {
	for _, way := range ways {
		late, other := pair(t, build(t), way)
		exporter, importer := starting(t, build(t), way, "SOFTCUDA_CONTEXT_DELAY_MS=300")
		procs := cuda.Group{late.process(), other.process(), exporter.process(), importer.process()}
		if err := unix.Kill(late.pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() {
			p, err := Park(t.Context(), procs, time.Minute)
			done <- errors.Join(err, p.Refusal())
		}()
		importer.says("", "102")
		if err := unix.Kill(late.pid, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if importer.imported() {
			t.Error("the memory is mapped still")
		}
		if err := Open(t.Context(), procs); err != nil {
			t.Fatal(err)
		}
		exporter.says("", "103")
		importer.says("", "104")
	}
}

// asks returns when a rank has an interposer, which it has from its import on, and a moment later.
func (r rank) asks() {
	r.t.Helper()
	for began := time.Now(); ; time.Sleep(time.Millisecond) {
		if c, err := Find(r.pid); err != nil || time.Since(began) > 10*time.Second {
			r.t.Fatalf("it has no interposer: %v", err)
		} else if c != nil {
			time.Sleep(50 * time.Millisecond)
			return
		}
	}
}

// stops has a rank stopped and let go on.
func (r rank) stops() {
	r.t.Helper()
	for _, signal := range []unix.Signal{unix.SIGSTOP, unix.SIGCONT} {
		if err := unix.Kill(r.pid, signal); err != nil {
			r.t.Fatal(err)
		}
		time.Sleep(20 * time.Millisecond)
	}
}
