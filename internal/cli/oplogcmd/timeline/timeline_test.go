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
	"unicode/utf8"

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
	for _, want := range []string{"checkpoint of &lt;job&gt; &amp; more", ">save GPU state<", "<title>save GPU state: 600 ms, 2GiB, from 0.0 ms on</title>", "<title>note: 1.0 ms, from 999 ms on</title>", ">600 ms, 2GiB<", `class="driver" x="210`, `class="failed" x="510`, ">1s<", "too short to see: note", ">the driver moves GPU memory<", ">failed<"} {
		if !strings.Contains(picture, want) {
			t.Errorf("no %q in %s", want, picture)
		}
	}
	if bars := strings.Count(picture, "<rect"); bars != 6 { // and the background, and the legend's three
		t.Errorf("%d rectangles", bars)
	}
}

// No label covers another one or leaves the picture, however long an operation took and whatever its steps are.
func TestLabelsApart(t *testing.T) {
	var long, many []images.Phase
	for i := range 40 {
		many = append(many, images.Phase{Name: "step of " + strings.Repeat("x", i%13), Start: time.Duration(i), Took: 1})
	}
	for whole := time.Duration(2); whole < longest; whole = whole*3/2 + 1 {
		long = []images.Phase{{Name: "give GPU state back again", Took: whole, Bytes: 987 << 40}, {Name: "end", Start: whole, Took: 0}}
		picture := SVG(Chart{Title: "checkpoint of " + strings.Repeat("0123456789abcdef", 5) + " at 2026-11-26T15:04:05Z: 1.234s, failed", Whole: whole, Failed: "end", Phases: append(long, many...)},
			Chart{Title: "restore", Whole: whole, Phases: many})
		var all []label
		for _, l := range labels(t, picture) {
			if l.left < 0 || l.right > pictureWidth {
				t.Errorf("%v: %q is from %.0f to %.0f", whole, l.text, l.left, l.right)
			}
			for _, other := range all {
				if l.y < other.y+fontSize && other.y < l.y+fontSize && l.left < other.right && other.left < l.right {
					t.Errorf("%v: %q covers %q", whole, l.text, other.text)
				}
			}
			all = append(all, l)
		}
		if len(all) < 20 {
			t.Fatalf("only %d labels", len(all))
		}
	}
}

// label is a text of a picture, and where it is.
type label struct {
	text        string
	left, right float64
	y           float64
}

func labels(t *testing.T, picture []byte) (found []label) {
	t.Helper()
	var drawing struct {
		Texts  []text `xml:"text"`
		Groups []struct {
			Texts []text `xml:"text"`
		} `xml:"g"`
	}
	if err := xml.Unmarshal(picture, &drawing); err != nil {
		t.Fatal(err)
	}
	all := drawing.Texts
	for _, g := range drawing.Groups {
		all = append(all, g.Texts...)
	}
	for _, each := range all {
		size, wide := float64(fontSize), letter
		if each.Size > 0 {
			size, wide = each.Size, boldLetter
		}
		width := wide * size * float64(utf8.RuneCountInString(each.Text))
		l := label{text: each.Text, left: each.X, y: each.Y}
		switch each.Anchor {
		case "middle":
			l.left -= width / 2
		case "end":
			l.left -= width
		}
		l.right = l.left + width
		found = append(found, l)
	}
	return found
}

type text struct {
	Text   string  `xml:",chardata"`
	X      float64 `xml:"x,attr"`
	Y      float64 `xml:"y,attr"`
	Anchor string  `xml:"text-anchor,attr"`
	Size   float64 `xml:"font-size,attr"`
}
