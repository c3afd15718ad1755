// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"
)

// arrivalRun is "gpuckpt restore --pull" from a registry that sends so many bytes a second. Times
// are the client's, in seconds.
type arrivalRun struct {
	// Rate is in bytes a second; 0 is no limit.
	Rate uint64 `json:"bytesPerSecond"`
	// Restore is until the program runs and containerd has the image, unpacked.
	Restore float64 `json:"restoreSeconds"`
	// Fetched are the bytes of blobs that the registry has sent.
	Fetched uint64 `json:"fetchedBytes"`
}

// arrivals are runs at each of arrivalRates.
type arrivals [3]arrivalRun

// arrivalRates returns the limits of the registry.
func arrivalRates() [len(arrivals{})]uint64 { return [...]uint64{100e6, 1e9, 0} }

// allowed is how long such a restore may take: a tenth more than the bytes take, and half a second.
func (r arrivalRun) allowed() float64 {
	return 1.1*float64(r.Fetched)/float64(r.Rate) + 0.5
}

// arrive restores an image from a registry at each rate. Nothing of it stays in containerd.
func (i *imageCase) arrive(ctx context.Context, server *registryServer, ref string, port int) (runs arrivals, err error) {
	defer server.limit.set(0)
	for n, rate := range arrivalRates() {
		server.limit.set(rate)
		r, id := arrivalRun{Rate: rate}, i.id()
		r.Restore, err = timed(func() error {
			return i.c.Gpuckpt(ctx, &struct{}{}, "restore", ref, "--pull", "--name", id, "--net-host", "--gpus", "0", "--cdi-spec-dirs", i.cdi, "--snapshotter", i.c.Snapshotter())
		})
		if err != nil {
			return runs, err
		}
		r.Fetched = server.limit.count()
		k := i.c.Adopt(id, port)
		if err := i.counts(ctx, k, "102"); err != nil {
			return runs, fmt.Errorf("after a restore from a registry of %s: %w", rateText(rate), err)
		}
		if err := errors.Join(k.Remove(ctx), i.c.ForgetImages(ctx)); err != nil {
			return runs, err
		}
		runs[n] = r
	}
	return runs, nil
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
	t := table{columns: []string{"GPU memory", "the registry sends", "runs", "fetched", "restore --pull", "the bytes alone", "at most 1.1 × that + 0.5 s", "pull, then ctr run"}}
	perRegistrySize(runs, func(size uint64, of func(func(registryRun) float64) spread) {
		for n, rate := range arrivalRates() {
			number := func(value func(arrivalRun) float64) spread {
				return of(func(r registryRun) float64 { return value(r.Arrivals[n]) })
			}
			took := number(func(r arrivalRun) float64 { return r.Restore })
			fetched := number(func(r arrivalRun) float64 { return float64(r.Fetched) }).Median
			alone, allowed, apart := "", "", ""
			if rate > 0 {
				last := number(arrivalRun.allowed).Median
				alone, allowed = seconds(fetched/float64(rate)), "kept"
				if took.Median > last {
					allowed = "missed"
				}
				allowed += ", " + seconds(last)
			} else {
				apart = of(func(r registryRun) float64 { return r.Pull + r.Resume }).text()
			}
			t.add(formatSize(size), rateText(rate), fmt.Sprint(took.N), roundSize(fetched), took.text(), alone, allowed, apart)
		}
	})
	return t
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

func (w *limited) Write(p []byte) (int, error) {
	time.Sleep(w.limit.take(len(p), time.Now()))
	return w.ResponseWriter.Write(p)
}
