// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/registryserver"
)

// parseRates reads a list of rates, "100MB,1GB,0", in bytes a second.
func parseRates(list string) (rates []uint64, _ error) {
	for text := range strings.SplitSeq(list, ",") {
		n, err := units.FromHumanSize(text)
		if err != nil || n < 0 {
			return nil, fmt.Errorf("--arrival-rates: %q is not a rate such as 100MB or 0", text)
		}
		rates = append(rates, uint64(n))
	}
	return rates, nil
}

// arrive restores an image from a registry at each rate. Nothing of it stays in containerd.
func (i *imageCase) arrive(ctx context.Context, server *registryserver.Server, ref string, port int) (runs []report.ArrivalRun, err error) {
	defer server.Limit(0)
	for _, rate := range i.rates {
		if _, err := i.cold(); err != nil {
			return runs, err
		}
		server.Limit(rate)
		r, id := report.ArrivalRun{Rate: rate}, i.id()
		first, flow := firstAnswer(ctx, port), watchFlow(ctx, server, port, i.c.GPU().Kind)
		r.Restore, err = timed(func() error {
			return i.c.Gpuckpt(ctx, &struct{}{}, "restore", ref, "--pull", "--name", id, "--net-host", "--gpus", "0", "--cdi-spec-dirs", i.cdi, "--snapshotter", i.c.Snapshotter())
		})
		r.Running, r.Flow = first(), flow()
		if err != nil {
			return runs, err
		}
		r.Fetched = server.Sent()
		k := i.c.Adopt(id, port)
		line, err := i.c.Timeline(id)
		if err != nil {
			return runs, err
		}
		r.Phases = line.Phases
		i.b.logf("from a registry of %s: running %s, image kept %s: %s", report.RateText(rate), report.Seconds(r.Running), report.Seconds(r.Restore), phaseText(r.Phases))
		if err := i.counts(ctx, k, "102"); err != nil {
			return runs, fmt.Errorf("after a restore from a registry of %s: %w", report.RateText(rate), err)
		}
		if err := errors.Join(k.Remove(ctx), i.c.ForgetImages(ctx)); err != nil {
			return runs, err
		}
		runs = append(runs, r)
	}
	return runs, nil
}

// firstAnswer begins to ask a program that is not there yet. The function that it returns says when
// the first answer came, in seconds, and ends the asking; 0 is that there was none.
func firstAnswer(ctx context.Context, port int) func() float64 {
	ctx, cancel := context.WithCancel(ctx)
	began, answered := time.Now(), make(chan float64, 1)
	go func() {
		defer close(answered)
		for ctx.Err() == nil {
			// A port without a program answers at once that there is none.
			if _, err := harness.Ask(ctx, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), "info"); err == nil {
				answered <- time.Since(began).Seconds()
				return
			}
		}
	}()
	return func() float64 {
		// The command ends behind the program's start, so the answer is on its way.
		stop := time.AfterFunc(10*time.Second, cancel)
		defer stop.Stop()
		defer cancel()
		return <-answered
	}
}

// phaseText lists what took a tenth of a second or more.
func phaseText(phases []images.Phase) string {
	var parts []string
	for _, p := range report.ByStart(phases) {
		if p.Took >= 100*time.Millisecond {
			parts = append(parts, fmt.Sprintf("%s %.2f–%.2f", p.Name, p.Start.Seconds(), (p.Start+p.Took).Seconds()))
		}
	}
	return strings.Join(parts, ", ")
}
