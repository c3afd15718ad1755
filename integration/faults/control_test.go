// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"encoding/json"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// point is what a program says that stands at one, see internal/node/fault.
type point struct {
	Operation, Step, Moment, Container string
	Pid                                int
}

// over is the step at whose end an operation is over (internal/node/fault).
const over = "over"

// control is where programs that were built for it ask at each point.
type control struct {
	path     string
	listener net.Listener

	mu sync.Mutex
	// lanes are asked what to answer, by the container's id. "" is to go on.
	lanes map[string]func(point) string
	// seen are the points that were reached.
	seen map[point]bool
}

func listen() (*control, error) {
	dir, err := os.MkdirTemp("", "faults") // short: a socket's path is
	if err != nil {
		return nil, err
	}
	c := &control{path: filepath.Join(dir, "s"), lanes: make(map[string]func(point) string), seen: make(map[point]bool)}
	if c.listener, err = net.Listen("unix", c.path); err != nil {
		return nil, err
	}
	go func() {
		for {
			conn, err := c.listener.Accept()
			if err != nil {
				return
			}
			go c.answer(conn)
		}
	}()
	return c, nil
}

func (c *control) close() error {
	_ = c.listener.Close()
	return os.RemoveAll(filepath.Dir(c.path))
}

// unknown are the points that were reached and that the table does not have.
func (c *control) unknown() (points []point) {
	known := make(map[point]bool)
	operations := make(map[string]bool)
	for _, p := range Places() {
		operations[p.Scenario.Operation] = true
		known[point{Operation: p.Scenario.Operation, Step: p.Step, Moment: p.Moment}] = true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for p := range c.seen {
		if operations[p.Operation] && p.Operation != Command && p.Step != over && !known[p] {
			points = append(points, p)
		}
	}
	return points
}

func (c *control) answer(conn net.Conn) {
	defer conn.Close()
	var p point
	if err := json.NewDecoder(conn).Decode(&p); err != nil {
		return
	}
	if shim, ok := strings.CutPrefix(p.Container, "child of "); ok {
		p.Container = containerOf(shim)
	}
	c.mu.Lock()
	ask := c.lanes[p.Container]
	c.seen[point{Operation: p.Operation, Step: p.Step, Moment: p.Moment}] = true
	c.mu.Unlock()
	if ask == nil {
		return
	}
	if answer := ask(p); answer != "" {
		_, _ = conn.Write([]byte(answer))
	}
}

// at has a lane's points answered; nil lets all go on.
func (c *control) at(container string, ask func(point) string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.lanes[container] = ask
}

// containerOf is the id of the container of a shim, as its command line has it.
func containerOf(shim string) string {
	line, _ := os.ReadFile(filepath.Join("/proc", shim, "cmdline"))
	words := strings.Split(string(line), "\x00")
	if at := slices.Index(words, "-id"); at >= 0 && at+1 < len(words) {
		return words[at+1]
	}
	return ""
}
