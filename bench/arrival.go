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
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// arrivalRun is "gpuckpt restore --pull" from a registry that sends so many bytes a second. Times
// are the client's, in seconds.
type arrivalRun struct {
	// Rate is in bytes a second; 0 is no limit.
	Rate uint64 `json:"bytesPerSecond"`
	// Running is until the program answers, Restore until containerd has the image too, unpacked.
	Running float64 `json:"runningSeconds"`
	Restore float64 `json:"restoreSeconds"`
	// Fetched are the bytes of blobs that the registry has sent.
	Fetched uint64 `json:"fetchedBytes"`
	// Phases are the shim's, from its Start on.
	Phases []images.Phase `json:"phases,omitempty"`
	// Flow is how far the bytes were meanwhile.
	Flow []flowPoint `json:"flow,omitempty"`
}

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
func (i *imageCase) arrive(ctx context.Context, server *registryServer, ref string, port int) (runs []arrivalRun, err error) {
	defer server.limit.set(0)
	for _, rate := range i.rates {
		if _, err := i.cold(); err != nil {
			return runs, err
		}
		server.limit.set(rate)
		r, id := arrivalRun{Rate: rate}, i.id()
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
		i.b.logf("from a registry of %s: running %s, image kept %s: %s", rateText(rate), seconds(r.Running), seconds(r.Restore), phaseText(r.Phases))
		if err := i.counts(ctx, k, "102"); err != nil {
			return runs, fmt.Errorf("after a restore from a registry of %s: %w", rateText(rate), err)
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
	for _, p := range byStart(phases) {
		if p.Took >= 100*time.Millisecond {
			parts = append(parts, fmt.Sprintf("%s %.2f–%.2f", p.Name, p.Start.Seconds(), (p.Start+p.Took).Seconds()))
		}
	}
	return strings.Join(parts, ", ")
}

func rateText(rate uint64) string {
	if rate == 0 {
		return "no limit"
	}
	return fmt.Sprintf("%d MB/s", rate/1e6)
}

// arrivalTable compares restores from a registry with a pull and a run, one after the other, from the
// same one without a limit, and with how long the bytes take.
func arrivalTable(runs []registryRun) table {
	t := table{columns: []string{"GPU memory", "the registry sends", "runs", "fetched", "running", "image kept", "the bytes alone", "at most 1.1 × that + 0.5 s", "pull, then ctr run"}}
	perRegistrySize(runs, func(size imageShape, of func(func(registryRun) float64) spread) {
		var rates []uint64
		for _, r := range runs {
			for _, a := range r.Arrivals {
				if !slices.Contains(rates, a.Rate) {
					rates = append(rates, a.Rate)
				}
			}
		}
		for _, rate := range rates {
			number := func(value func(registryRun, arrivalRun) float64) spread {
				return of(func(r registryRun) float64 {
					at := slices.IndexFunc(r.Arrivals, func(a arrivalRun) bool { return a.Rate == rate })
					if at < 0 {
						return 0
					}
					return value(r, r.Arrivals[at])
				})
			}
			running := number(func(_ registryRun, a arrivalRun) float64 { return a.Running })
			kept := number(func(_ registryRun, a arrivalRun) float64 { return a.Restore })
			fetched := number(func(_ registryRun, a arrivalRun) float64 { return float64(a.Fetched) }).Median
			alone := number(func(r registryRun, a arrivalRun) float64 { return r.alone(a) }).Median
			allowed, apart := "", ""
			if alone > 0 {
				last := 1.1*alone + 0.5
				allowed = "kept, " + seconds(last)
				if running.Median > last {
					allowed = "missed, " + seconds(last)
				}
			}
			if rate == 0 {
				apart = of(func(r registryRun) float64 { return r.Pull + r.Resume }).text()
			}
			t.add(size.String(), rateText(rate), fmt.Sprint(running.N), roundSize(fetched), running.text(), kept.text(), seconds(alone), allowed, apart)
		}
	})
	return t
}

// alone is how long the bytes of an arrival take: by the limit, or by what the registry itself can do.
func (r registryRun) alone(a arrivalRun) float64 {
	rate := r.Alone
	if a.Rate > 0 && (rate == 0 || float64(a.Rate) < rate) {
		rate = float64(a.Rate)
	}
	if rate == 0 {
		return 0
	}
	return float64(a.Fetched) / rate
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

// take returns how long the sender of so many bytes has to wait.
func (l *limiter) take(bytes int, now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sent += uint64(bytes)
	if l.rate == 0 {
		return 0
	}
	if l.next.Before(now) {
		l.next = now
	}
	wait := l.next.Sub(now)
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
		return io.Copy(struct{ io.Writer }{w}, r)
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
