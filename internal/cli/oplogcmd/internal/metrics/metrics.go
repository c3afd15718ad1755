// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package metrics counts what the shims have written into the log of operations, for Prometheus.
//
// The life of a number: a shim ends and leaves a line in the log of operations, Collector takes it in at the
// next scrape. Suspended containers are counted in the bundles, at each scrape.
package metrics

import (
	"encoding/json"
	"os"
	"path/filepath"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
)

// Collector has the numbers.
type Collector struct {
	bundles string // a pattern

	operations, failures, bytes *prometheus.CounterVec
	operation                   *prometheus.HistogramVec
	phase                       *prometheus.SummaryVec
	succeeded, build            *prometheus.GaugeVec
	containers, gpus            *prometheus.Desc
}

// known are the operations, so that each has its numbers from the start on: a rate of what is not there
// yet is no rate of 0.
var known = []string{"checkpoint", "restore", "suspend", "resume"}

// seconds are the limits of the histogram: from what a small container needs to a disk's time for
// hundreds of GiB.
var seconds = []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// New returns a Collector without operations. state is containerd's directory of state,
// /run/containerd by default, in which the bundles of containers are.
func New(state string) *Collector {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	}
	gauge := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	}
	c := &Collector{
		bundles:    filepath.Join(state, "io.containerd.runtime.v2.task", "*", "*"),
		operations: counter("gpuckpt_operations_total", "Operations that are over: checkpoint, restore, suspend, resume. The outcome is success, failure, or afresh: started from the beginning instead.", "operation", "outcome"),
		failures:   counter("gpuckpt_failures_total", "Operations that failed, by the step that did.", "operation", "step"),
		bytes:      counter("gpuckpt_bytes_total", "Bytes that steps moved.", "operation", "phase"),
		operation: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "gpuckpt_operation_seconds", Help: "How long operations took that succeeded.", Buckets: seconds,
		}, []string{"operation"}),
		// Without limits: there are some forty steps, and each limit would be a series of each.
		phase: prometheus.NewSummaryVec(prometheus.SummaryOpts{
			Name: "gpuckpt_phase_seconds", Help: "How long the steps of operations took.",
		}, []string{"operation", "phase"}),
		succeeded:  gauge("gpuckpt_last_success_timestamp_seconds", "When the last operation ended that succeeded.", "operation"),
		build:      gauge("gpuckpt_build_info", "1, with gpuckpt's version.", "version"),
		containers: prometheus.NewDesc("gpuckpt_suspended_containers", "Containers that are suspended now.", nil, nil),
		gpus:       prometheus.NewDesc("gpuckpt_suspended_gpus", "GPUs that suspended containers have left; a GPU that two have left counts twice.", nil, nil),
	}
	c.build.WithLabelValues(version.Short()).Set(1)
	c.operations.WithLabelValues("restore", "afresh")
	for _, operation := range known {
		c.operations.WithLabelValues(operation, "success")
		c.operations.WithLabelValues(operation, "failure")
		c.operation.WithLabelValues(operation)
	}
	return c
}

// Add counts operations.
func (c *Collector) Add(entries []oplog.Entry) {
	for _, e := range entries {
		if e.Afresh() {
			c.operations.WithLabelValues(e.Operation, "afresh").Inc()
		} else if e.Failed != "" {
			c.operations.WithLabelValues(e.Operation, "failure").Inc()
			c.failures.WithLabelValues(e.Operation, e.Failed).Inc()
		} else {
			c.operations.WithLabelValues(e.Operation, "success").Inc()
			c.operation.WithLabelValues(e.Operation).Observe(e.Took.Seconds())
			c.succeeded.WithLabelValues(e.Operation).Set(float64(e.Began.Add(e.Took).UnixMilli()) / 1000)
		}
		for _, p := range e.Phases {
			c.phase.WithLabelValues(e.Operation, p.Name).Observe(p.Took.Seconds())
			if p.Bytes > 0 {
				c.bytes.WithLabelValues(e.Operation, p.Name).Add(float64(p.Bytes))
			}
		}
	}
}

func (c *Collector) parts() []prometheus.Collector {
	return []prometheus.Collector{c.operations, c.failures, c.bytes, c.operation, c.phase, c.succeeded, c.build}
}

// Describe is of prometheus.Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, p := range c.parts() {
		p.Describe(to)
	}
	to <- c.containers
	to <- c.gpus
}

// Collect is of prometheus.Collector.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	for _, p := range c.parts() {
		p.Collect(to)
	}
	containers, gpus := c.suspended()
	to <- prometheus.MustNewConstMetric(c.containers, prometheus.GaugeValue, float64(containers))
	to <- prometheus.MustNewConstMetric(c.gpus, prometheus.GaugeValue, float64(gpus))
}

// suspended counts the containers that their last operation has left suspended, and the GPUs of their
// specs. A bundle that is going meanwhile does not count.
func (c *Collector) suspended() (containers, gpus int) {
	bundles, _ := filepath.Glob(c.bundles) // the pattern is right
	for _, dir := range bundles {
		var last oplog.Entry
		if !read(filepath.Join(dir, sequence.TimelineName), &last) || !last.Suspended() {
			continue
		}
		containers++
		var spec specs.Spec
		if read(filepath.Join(dir, "config.json"), &spec) {
			gpus += len(cdi.Read(&spec).Minors)
		}
	}
	return containers, gpus
}

func read(file string, into any) bool {
	data, err := os.ReadFile(file)
	return err == nil && json.Unmarshal(data, into) == nil
}
