// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"fmt"
	"strings"
)

// Status is the outcome of a check.
type Status string

// The outcomes of a check: a Warning is slow or keeps some containers from working, a Failure all.
const (
	OK      Status = "ok"
	Warning Status = "warning"
	Failure Status = "failure"
)

// Check is one thing that was looked at.
type Check struct {
	// Area groups checks: "kernel", "criu", "cgroup", "driver", "gpu", "cdi", "containerd", "runc",
	// "gpuckpt", "memory", "operations", "checkpoint".
	Area string `json:"area"`
	// Name is the name of the thing, unique in its area.
	Name   string `json:"name"`
	Status Status `json:"status"`
	// Found is what is there, in words.
	Found string `json:"found"`
	// Problem is what does not work because of it; empty if everything works.
	Problem string `json:"problem,omitempty"`
	// Fix is the shell command that corrects it, or a shell comment with what to do where no
	// command does; empty if there is nothing to correct.
	Fix string `json:"fix,omitempty"`
}

// Report is the outcome of all checks of a node.
type Report struct {
	// Status is the worst of the checks'.
	Status   Status  `json:"status"`
	Failures int     `json:"failures"`
	Warnings int     `json:"warnings"`
	Checks   []Check `json:"checks"`
	// Annotations are the node's Facts, for schedulers; see Facts.
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Add adds checks.
func (r *Report) Add(checks ...Check) {
	r.Checks = append(r.Checks, checks...)
	for _, c := range checks {
		switch c.Status {
		case Failure:
			r.Failures++
		case Warning:
			r.Warnings++
		}
	}
	r.Status = OK
	if r.Failures > 0 {
		r.Status = Failure
	} else if r.Warnings > 0 {
		r.Status = Warning
	}
}

type area struct {
	name   string
	checks []Check
}

func (a *area) ok(name, found string, args ...any) {
	a.checks = append(a.checks, Check{Area: a.name, Name: name, Status: OK, Found: fmt.Sprintf(found, args...)})
}

// either adds what was found if all is good, and a check of the status if not.
func (a *area) either(good bool, name, found string, status Status, instead, problem, fix string) {
	if good {
		a.ok(name, "%s", found)
	} else {
		a.add(status, name, instead, problem, fix)
	}
}

// with adds a check and returns all.
func (a *area) with(status Status, name, found, problem, fix string) []Check {
	a.add(status, name, found, problem, fix)
	return a.checks
}

func (a *area) add(status Status, name, found, problem, fix string) {
	a.checks = append(a.checks, Check{Area: a.name, Name: name, Status: status, Found: found, Problem: problem, Fix: fix})
}

// Text has a line for each check, and below it what does not work and how to fix it.
func (r *Report) Text() string {
	var b strings.Builder
	width, last := 0, ""
	for _, c := range r.Checks {
		width = max(width, min(len(c.Name), 24))
	}
	for _, c := range r.Checks {
		area := c.Area
		if area == last {
			area = ""
		}
		last = c.Area
		fmt.Fprintf(&b, "%-10s  %-7s  %-*s  %s\n", area, c.Status, width, c.Name, c.Found)
		if c.Problem != "" {
			fmt.Fprintf(&b, "%21s%s\n", "", c.Problem)
		}
		if c.Fix != "" {
			mark := "$ "
			if strings.HasPrefix(c.Fix, "# ") {
				mark = "" // advice
			}
			fmt.Fprintf(&b, "%21s%s%s\n", "", mark, strings.ReplaceAll(c.Fix, "\n", "\n"+strings.Repeat(" ", 21+len(mark))))
		}
	}
	if r.Failures == 0 { // else the error says it
		b.WriteString(r.Summary() + "\n")
	}
	return b.String()
}

// Summary counts the problems.
func (r *Report) Summary() string {
	return Count(r.Failures, "failure") + ", " + Count(r.Warnings, "warning")
}

// Count words a number of things.
func Count(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
