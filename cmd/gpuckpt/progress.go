// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/sys/unix"
)

// plainEvery is how often a step without a terminal tells how far it is.
const plainEvery = 10 * time.Second

// progress shows how far the steps of a command are: bars on a terminal, lines
// elsewhere, nothing when it was told to be quiet.
type progress struct {
	out  io.Writer
	bars *mpb.Progress // nil without a terminal
	mu   sync.Mutex
}

// newProgress shows on standard error.
func newProgress(quiet bool) *progress {
	if quiet {
		return &progress{out: io.Discard}
	}
	p := &progress{out: os.Stderr}
	if _, err := unix.IoctlGetTermios(int(os.Stderr.Fd()), unix.TCGETS); err == nil {
		p.bars = mpb.New(mpb.WithOutput(os.Stderr), mpb.WithRefreshRate(150*time.Millisecond))
	}
	return p
}

// line tells of something that happened.
func (p *progress) line(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bars != nil {
		fmt.Fprintf(p.bars, format+"\n", args...)
		return
	}
	fmt.Fprintf(p.out, format+"\n", args...)
}

// wait ends the display.
func (p *progress) wait() {
	if p.bars != nil {
		p.bars.Wait()
	}
}

// step is one step of a command: so many bytes of so many, of which the total
// may not be known at first.
type step struct {
	p     *progress
	name  string
	began time.Time
	bar   *mpb.Bar

	mu          sync.Mutex
	done, total int64
	told        time.Time
}

// step begins one; it must be ended.
func (p *progress) step(name string) *step {
	s := &step{p: p, name: name, began: time.Now(), told: time.Now()}
	if p.bars != nil {
		s.bar = p.bars.AddBar(0,
			mpb.PrependDecorators(decor.Name(name, decor.WCSyncSpaceR)),
			mpb.AppendDecorators(
				decor.CountersKibiByte("% .1f / % .1f", decor.WCSyncSpace),
				decor.AverageSpeed(decor.SizeB1024(0), "% .1f", decor.WCSyncSpace),
				decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO, decor.WCSyncSpace), "done"),
			))
	}
	return s
}

// do shows one step, from its beginning to its end; note is what came of it.
func (p *progress) do(name, note string, run func(*step) error) error {
	s := p.step(name)
	if err := run(s); err != nil {
		s.end("")
		return err
	}
	s.end(note)
	return nil
}

// add counts bytes; set says how many there are of how many.
func (s *step) add(bytes, total int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.show(s.done+bytes, max(total, s.total))
}

func (s *step) set(done, total uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.show(int64(done), int64(total))
}

func (s *step) show(done, total int64) {
	s.done, s.total = done, total
	if s.bar != nil {
		s.bar.SetTotal(total, false)
		s.bar.SetCurrent(done)
		return
	}
	if now := time.Now(); now.Sub(s.told) >= plainEvery {
		s.told = now
		s.p.line("%s: %s", s.name, s.words(now))
	}
}

// words tell how far a step is: bytes, rate, and the time left at that rate.
func (s *step) words(now time.Time) string {
	took := now.Sub(s.began)
	rate := float64(s.done) / max(took.Seconds(), 1e-3)
	text := size(uint64(max(s.done, 0)))
	if s.total > 0 {
		text += " of " + size(uint64(s.total))
	}
	text += fmt.Sprintf(", %s/s", size(uint64(max(rate, 0))))
	if left := s.total - s.done; left > 0 && rate > 0 {
		text += fmt.Sprintf(", %s left", (time.Duration(float64(left) / rate * float64(time.Second))).Round(time.Second))
	}
	return text
}

// end ends the step; note is what came of it, "" when it failed.
func (s *step) end(note string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bar != nil {
		if note == "" {
			s.bar.Abort(false)
		} else {
			s.bar.SetTotal(s.done, true)
		}
	}
	if note != "" && s.p.bars == nil {
		s.p.line("%s: %s in %s", s.name, note, time.Since(s.began).Round(10*time.Millisecond))
	}
}

// size is a number of bytes in words.
func size(bytes uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB"}
	v, i := float64(bytes), 0
	for v >= 1024 && i < len(units)-1 {
		v /= 1024
		i++
	}
	if i == 0 {
		return fmt.Sprintf("%d B", bytes)
	}
	return fmt.Sprintf("%.1f %s", v, units[i])
}
