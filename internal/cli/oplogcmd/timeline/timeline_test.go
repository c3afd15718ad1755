// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package timeline

import (
	"encoding/xml"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

func TestTick(t *testing.T) {
	for whole, want := range map[time.Duration]time.Duration{
		0: time.Second, time.Second: 200 * time.Millisecond, 3700 * time.Millisecond: 500 * time.Millisecond, 560 * time.Millisecond: 100 * time.Millisecond, 2: 1,
	} {
		if got := tick(whole); got != want {
			t.Errorf("tick of %v is %v, want %v", whole, got, want)
		}
	}
}

// A picture is well-formed, has a bar for each phase with what it says, and marks what failed. What is too
// short to see has a name and no bar. A legend has the colors.
func TestSVG(t *testing.T) {
	picture := string(SVG(Chart{Title: "checkpoint of <job> & more", Whole: time.Second, Failed: "dump", Phases: []images.Phase{
		{Name: "save GPU state", Took: 600 * time.Millisecond, Bytes: 2 << 30}, {Name: "dump", Start: 600 * time.Millisecond, Took: 400 * time.Millisecond},
		{Name: "note", Start: 999 * time.Millisecond, Took: time.Millisecond},
	}}))
	decoder := xml.NewDecoder(strings.NewReader(picture))
	for {
		if _, err := decoder.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []string{"checkpoint of &lt;job&gt; &amp; more", ">save GPU state<", "600 ms, 2GiB", `class="driver" x="210`, `class="failed" x="510`, ">1s<", "too short to see: note", ">the driver moves GPU memory<", ">failed<"} {
		if !strings.Contains(picture, want) {
			t.Errorf("no %q in %s", want, picture)
		}
	}
	if bars := strings.Count(picture, "<rect"); bars != 6 { // and the background, and the legend's three
		t.Errorf("%d rectangles", bars)
	}
}
