// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package progress shows how far the steps of a command are.
package progress

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"github.com/docker/go-units"
	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
	"golang.org/x/term"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

// How often a line says how far a step is, where there is no terminal: for people, and for programs.
const (
	plainEvery = 10 * time.Second
	jsonEvery  = time.Second
)

// Progress shows how far the steps of a command are: bars on a terminal, lines elsewhere.
type Progress struct {
	out   io.Writer
	lines *json.Encoder // nil for people
	bars  *mpb.Progress // nil without a terminal
	mu    sync.Mutex
	steps map[string]*step // those that have not ended
}

type step struct {
	began, told time.Time
	bar         *mpb.Bar
}

// line is how far a step is, in JSON.
type line struct {
	Step  string `json:"step"`
	Done  uint64 `json:"done"`            // bytes
	Total uint64 `json:"total,omitempty"` // while it is known
}

// New shows on standard error, or nowhere if quiet.
func New(quiet, asJSON bool) *Progress {
	p := &Progress{out: visible.Writer(os.Stderr), steps: make(map[string]*step)}
	switch {
	case quiet:
		p.out = io.Discard
	case asJSON:
		p.lines = json.NewEncoder(os.Stderr)
	case term.IsTerminal(int(os.Stderr.Fd())):
		p.bars = mpb.New(mpb.WithOutput(os.Stderr), mpb.WithRefreshRate(150*time.Millisecond))
		p.out = visible.Writer(p.bars)
	}
	return p
}

// Wait ends the display. Bars of steps that have not ended stay as they are.
func (p *Progress) Wait() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bars == nil {
		return
	}
	for _, s := range p.steps {
		s.bar.Abort(false)
	}
	p.bars.Wait()
}

// Show is an images.Progress.
func (p *Progress) Show(now images.Step) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.steps[now.Name]
	if s == nil {
		began := time.Now()
		s = &step{began: began, told: began}
		if p.bars != nil {
			s.bar = p.bars.AddBar(0,
				mpb.PrependDecorators(decor.Name(visible.Text(now.Name), decor.WCSyncSpaceR)),
				mpb.AppendDecorators(
					decor.CountersKibiByte("% .1f / % .1f", decor.WCSyncSpace),
					decor.AverageSpeed(decor.SizeB1024(0), "% .1f", decor.WCSyncSpace),
					decor.OnComplete(decor.AverageETA(decor.ET_STYLE_GO, decor.WCSyncSpace), "done"),
				))
		}
		p.steps[now.Name] = s
	}
	if now.Ended {
		delete(p.steps, now.Name)
	}
	switch {
	case p.lines != nil:
		if time.Since(s.told) >= jsonEvery || now.Ended && s.told != s.began {
			s.told = time.Now()
			_ = p.lines.Encode(line{now.Name, now.Done, now.Total})
		}
	case now.Note != "" && !now.Ended:
		fmt.Fprintf(p.out, "%s: %s\n", now.Name, now.Note)
	case s.bar != nil && now.Ended:
		s.bar.SetTotal(int64(now.Done), true)
	case s.bar != nil:
		s.bar.SetTotal(int64(now.Total), false)
		s.bar.SetCurrent(int64(now.Done))
	case now.Ended:
		fmt.Fprintf(p.out, "%s: %s in %s\n", now.Name, now.Note, time.Since(s.began).Round(10*time.Millisecond))
	case time.Since(s.told) >= plainEvery:
		s.told = time.Now()
		fmt.Fprintf(p.out, "%s: %s\n", now.Name, rate(now, time.Since(s.began)))
	}
}

// rate says how far a step is: bytes, rate, and the time left at that rate.
func rate(s images.Step, took time.Duration) string {
	rate := float64(s.Done) / max(took.Seconds(), 1e-3)
	text := units.BytesSize(float64(s.Done))
	if s.Total > 0 {
		text += " of " + units.BytesSize(float64(s.Total))
	}
	text += ", " + units.BytesSize(rate) + "/s"
	if s.Done < s.Total && rate > 0 {
		text += fmt.Sprintf(", %s left", time.Duration(float64(s.Total-s.Done)/rate*float64(time.Second)).Round(time.Second))
	}
	return text
}
