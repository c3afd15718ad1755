// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registryserver

import (
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

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
