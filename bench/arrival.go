// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
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
func (i *imageCase) arrive(ctx context.Context, server *registryServer, ref string, port int) (runs []report.ArrivalRun, err error) {
	defer server.limit.set(0)
	for _, rate := range i.rates {
		if _, err := i.cold(); err != nil {
			return runs, err
		}
		server.limit.set(rate)
		r, id := report.ArrivalRun{Rate: rate}, i.id()
		first, flow := firstAnswer(ctx, port), watchFlow(ctx, server.limit, port, i.c.GPU().Kind)
		r.Restore, err = timed(func() error {
			return i.c.Gpuckpt(ctx, &struct{}{}, "restore", ref, "--pull", "--name", id, "--net-host", "--gpus", "0", "--cdi-spec-dirs", i.cdi, "--snapshotter", i.c.Snapshotter())
		})
		r.Running, r.Flow = first(), flow()
		if err != nil {
			return runs, err
		}
		r.Fetched = server.limit.count()
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

// limiter holds back what a registry sends of blobs, over all connections, and counts it.
type limiter struct {
	mu   sync.Mutex
	rate uint64    // bytes a second; 0: no limit
	next time.Time // when the next byte may go
	sent uint64
}

// set sets the rate, and counts from 0 on.
func (l *limiter) set(rate uint64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rate, l.next, l.sent = rate, time.Time{}, 0
}

func (l *limiter) count() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.sent
}

func (l *limiter) limits() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rate > 0
}

// maxBehind is how much time the senders make up for. A sleep takes a millisecond longer than it was to on
// some machines, more than a piece takes to send.
const maxBehind = 20 * time.Millisecond

// take returns how long the sender of so many bytes has to wait.
func (l *limiter) take(bytes int, now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent += uint64(bytes)
	if l.rate == 0 {
		return 0
	}
	if least := now.Add(-maxBehind); l.next.Before(least) {
		l.next = least
	}
	wait := max(l.next.Sub(now), 0)
	l.next = l.next.Add(time.Duration(float64(bytes) / float64(l.rate) * float64(time.Second)))
	return wait
}

// handler limits next.
func (l *limiter) handler(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			w = &limited{w, l}
		}
		next.ServeHTTP(w, r)
	})
}

type limited struct {
	http.ResponseWriter
	limit *limiter
}

// ReadFrom has the kernel send a file by itself while there is no limit, as registries do.
func (w *limited) ReadFrom(r io.Reader) (int64, error) {
	from, ok := w.ResponseWriter.(io.ReaderFrom)
	if !ok || w.limit.limits() {
		return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{r}, make([]byte, 256<<10))
	}
	const piece = 4 << 20 // so that it is counted on the way
	total := int64(0)
	for {
		n, err := from.ReadFrom(io.LimitReader(r, piece))
		w.limit.take(int(n), time.Now())
		if total += n; err != nil || n < piece {
			return total, err
		}
	}
}

func (w *limited) Write(p []byte) (int, error) {
	time.Sleep(w.limit.take(len(p), time.Now()))
	return w.ResponseWriter.Write(p)
}
