// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package sequence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// diary notes what a sequence does.
type diary []string

// step makes a step that writes into the diary and fails as told.
func (d *diary) step(name string, fail, failBack error) Step {
	return Step{
		Name: name, Do: func(context.Context) (uint64, error) { *d = append(*d, name); return 7, fail },
		Back: "un" + name, Undo: func(ctx context.Context) error {
			if ctx.Err() != nil {
				*d = append(*d, "cancelled")
			}
			*d = append(*d, "un"+name)
			return failBack
		},
	}
}

func TestSequence(t *testing.T) {
	broken, stuck, jammed := errors.New("broken"), errors.New("stuck"), errors.New("jammed")
	for _, test := range []struct {
		name  string
		steps func(d *diary) []Step
		want  []string
		err   string
		is    []error
	}{
		{
			name: "all goes well", want: []string{"a", "b"},
			steps: func(d *diary) []Step { return []Step{d.step("a", nil, nil), d.step("b", nil, nil)} },
		},
		{
			name: "the first fails", want: []string{"a"}, err: "a: broken", is: []error{broken},
			steps: func(d *diary) []Step { return []Step{d.step("a", broken, nil), d.step("b", nil, nil)} },
		},
		{
			name: "the last fails", want: []string{"a", "b", "c", "unb", "una"}, err: "c: broken", is: []error{broken},
			steps: func(d *diary) []Step {
				return []Step{d.step("a", nil, nil), d.step("b", nil, nil), d.step("c", broken, nil)}
			},
		},
		{
			name: "nothing to undo in between", want: []string{"a", "b", "c", "una"}, err: "c: broken",
			steps: func(d *diary) []Step {
				b := d.step("b", nil, nil)
				b.Undo = nil
				return []Step{d.step("a", nil, nil), b, d.step("c", broken, nil)}
			},
		},
		{
			name: "the way back fails too", want: []string{"a", "b", "c", "unb", "una"},
			err: "c: broken; on the way back: unb: stuck; on the way back: una: jammed", is: []error{broken, stuck, jammed},
			steps: func(d *diary) []Step {
				return []Step{d.step("a", nil, jammed), d.step("b", nil, stuck), d.step("c", broken, nil)}
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var d diary
			err := New("checkpoint", "id").Run(t.Context(), test.steps(&d)...)
			if !slices.Equal(d, test.want) {
				t.Errorf("done: %q, want %q", []string(d), test.want)
			}
			if got := ""; err != nil {
				if got = err.Error(); got != test.err {
					t.Errorf("error %q, want %q", got, test.err)
				}
			} else if test.err != "" {
				t.Errorf("no error, want %q", test.err)
			}
			for _, each := range test.is {
				if !errors.Is(err, each) {
					t.Errorf("%v is lost in %v", each, err)
				}
			}
		})
	}
}

// A client that gives up stops the sequence at the next step; the way back is
// not cut short by it.
func TestSequenceGivenUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var d diary
	a, b := d.step("a", nil, nil), d.step("b", nil, nil)
	b.Do = func(context.Context) (uint64, error) { d = append(d, "b"); cancel(); return 0, nil }
	err := New("checkpoint", "id").Run(ctx, a, b, d.step("c", nil, nil))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want cancelled", err)
	}
	if err == nil || !strings.Contains(err.Error(), "given up before c") {
		t.Errorf("error %v", err)
	}
	if want := []string{"a", "b", "unb", "una"}; !slices.Equal(d, want) {
		t.Errorf("done: %q, want %q", []string(d), want)
	}
}

// The way back can be taken after success too, once.
func TestSequenceGoBack(t *testing.T) {
	var d diary
	q := New("checkpoint", "id")
	if err := q.Run(t.Context(), d.step("a", nil, nil), d.step("b", nil, nil)); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := q.goBack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if want := []string{"a", "b", "unb", "una"}; !slices.Equal(d, want) {
		t.Errorf("done: %q, want %q", []string(d), want)
	}
}

func TestTimeline(t *testing.T) {
	bundle, logs := t.TempDir(), t.TempDir()
	node := filepath.Join(bundle, "config.toml")
	if err := os.WriteFile(node, fmt.Appendf(nil, "log_dir = %q\n", logs), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv(config.Env, node)
	var d diary
	q := New("restore", "id")
	if err := q.Run(t.Context(), d.step("a", nil, nil), d.step("b", errors.New("broken"), nil)); err == nil {
		t.Fatal("no error")
	}
	q.Save(t.Context(), bundle)
	data, err := os.ReadFile(filepath.Join(bundle, TimelineName))
	if err != nil {
		t.Fatal(err)
	}
	var line oplog.Entry
	if err := json.Unmarshal(data, &line); err != nil {
		t.Fatal(err)
	}
	var names []string
	for i, p := range line.Phases {
		names = append(names, p.Name)
		if p.Start < 0 || p.Took < 0 || i > 0 && p.Start < line.Phases[i-1].Start || p.Start+p.Took > line.Took {
			t.Errorf("phase %+v in %+v", p, line)
		}
	}
	if want := []string{"a", "b", "una"}; line.Operation != "restore" || !slices.Equal(names, want) {
		t.Errorf("%s with %q, want restore with %q", line.Operation, names, want)
	}
	if line.Phases[0].Bytes != 7 {
		t.Errorf("%d bytes, want 7", line.Phases[0].Bytes)
	}
	if line.Failed == "" {
		t.Error("the timeline does not say that it failed")
	}
	noted, err := oplog.Read(logs)
	if err != nil || len(noted) != 1 || noted[0].Failed != "b" || noted[0].Error != "broken" || noted[0].Container != "id" || len(noted[0].Phases) != 3 {
		t.Errorf("the log of operations has %+v, %v", noted, err)
	}
	q.Save(t.Context(), filepath.Join(bundle, "missing")) // logged, and no more
}

// What takes results away is called until the operation is complete, and then no more;
// the rest of the way back stays open, and what follows is not given up.
func TestSequenceCompletes(t *testing.T) {
	broken := errors.New("broken")
	for _, test := range []struct {
		name string
		end  func(d *diary) []Step
		want []string
	}{
		{"fails before", func(d *diary) []Step { return []Step{d.step("c", broken, nil)} }, []string{"a", "b", "c", "unb", "una"}},
		{"fails after", func(d *diary) []Step {
			c := d.step("c", nil, nil)
			c.Completes, c.Undo = true, nil
			return []Step{c, d.step("d", broken, nil)}
		}, []string{"a", "b", "c", "d", "una"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			d, q := new(diary), New("test", "id")
			b := d.step("b", nil, nil)
			b.UntilComplete = true
			err := q.Run(t.Context(), append([]Step{d.step("a", nil, nil), b}, test.end(d)...)...)
			if !errors.Is(err, broken) || !slices.Equal(*d, test.want) {
				t.Errorf("%q, error %v; want %q", *d, err, test.want)
			}
		})
	}
	for _, fails := range []error{nil, broken} {
		d, q := new(diary), New("test", "id")
		b := d.step("b", nil, nil)
		b.UntilComplete = true
		if err := q.Run(t.Context(), d.step("a", nil, nil), b); err != nil {
			t.Fatal(err)
		}
		if back, err := q.RunBeside(t.Context(), Step{Name: "c", Do: func(context.Context) (uint64, error) { return 0, fails }}); back != nil || !errors.Is(err, fails) {
			t.Errorf("way back %v, error %v", back, err)
		}
		want := []string{"a", "b", "una"}
		if fails != nil {
			want = append(want, "unb")
		}
		if !slices.Equal(*d, want) {
			t.Errorf("beside, with %v: %q, want %q", fails, *d, want)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	d, q := new(diary), New("test", "id")
	err := q.Run(ctx, Step{Name: "metadata", Completes: true, Do: func(context.Context) (uint64, error) { cancel(); return 0, nil }}, d.step("stop", nil, nil))
	if err != nil || !slices.Equal(*d, []string{"stop"}) {
		t.Errorf("given up after it was complete: %q, %v", *d, err)
	}
}

// The way back and the steps beside it do not wait for each other, and each has
// its own error.
func TestRunBeside(t *testing.T) {
	q := New("test", "id")
	began, undone := make(chan struct{}), make(chan struct{})
	stuck, full := errors.New("stuck"), errors.New("full")
	err := q.Run(t.Context(), Step{
		Name: "save", Do: func(context.Context) (uint64, error) { return 0, nil },
		Back: "give back", Undo: func(context.Context) error { <-began; close(undone); return stuck },
	})
	if err != nil {
		t.Fatal(err)
	}
	back, err := q.RunBeside(t.Context(), Step{Name: "store", Do: func(context.Context) (uint64, error) {
		close(began)
		<-undone
		return 0, full
	}}, Step{Name: "never", Do: func(context.Context) (uint64, error) { t.Error("taken after a failure"); return 0, nil }})
	if !errors.Is(back, stuck) || errors.Is(back, full) || !errors.Is(err, full) || errors.Is(err, stuck) {
		t.Errorf("back %v, error %v", back, err)
	}
	var names []string
	for _, p := range q.Phases() {
		names = append(names, p.Name)
	}
	if len(names) != 3 || names[0] != "save" {
		t.Errorf("phases %q", names)
	}
}

// told is a Journal that keeps what it is told.
type told []string

func (j *told) Note(_ context.Context, step string, undo []string) {
	*j = append(*j, step+" < "+strings.Join(undo, ","))
}

// The journal is told of a step before it is taken, and what would then undo.
func TestJournal(t *testing.T) {
	var d diary
	var j told
	q := New("checkpoint", "id")
	q.Journal = &j
	stuck := errors.New("stuck")
	c := d.step("c", nil, nil)
	c.Do = func(context.Context) (uint64, error) {
		if want := (told{"a < ", "b < una", "c < unb,una"}); !slices.Equal(j, want) {
			t.Errorf("told %q, want %q", j, want)
		}
		return 0, errors.New("broken")
	}
	if err := q.Run(t.Context(), d.step("a", nil, stuck), d.step("b", nil, nil), c); err == nil {
		t.Fatal("no error")
	}
	if want := (told{"unb < unb,una", "una < una"}); !slices.Equal(j[3:], want) {
		t.Errorf("told %q, want %q", j[3:], want)
	}
	if !errors.Is(q.Stuck, stuck) {
		t.Errorf("stuck is %v", q.Stuck)
	}
}
