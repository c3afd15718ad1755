// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package hostile

import (
	"fmt"
	"hash/fnv"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/criu/image/imagetest"
	"github.com/gpuckpt/gpuckpt/internal/guard"
)

// Which changes are tried: "all", every nth ("50", or "50:3" for others), or those that an expression
// finds. `make test-hostile` sets it.
const envChanges = "GPUCKPT_HOSTILE"

// chosen returns a function that reports whether a change is tried.
func chosen(t *testing.T, nth int) func(imagetest.Change) bool {
	t.Helper()
	text, seed := os.Getenv(envChanges), uint64(0)
	if number, shift, ok := strings.Cut(text, ":"); ok {
		if n, err := strconv.ParseUint(shift, 10, 32); err == nil {
			text, seed = number, n
		}
	}
	switch n, err := strconv.Atoi(text); {
	case text == "all":
		return func(imagetest.Change) bool { return true }
	case err == nil:
		nth = n
	case text != "":
		want, err := regexp.Compile(text)
		if err != nil {
			t.Fatal(err)
		}
		return func(c imagetest.Change) bool { return want.MatchString(c.String()) }
	}
	t.Logf("every %dth change is tried; make test-hostile tries all", nth)
	return func(c imagetest.Change) bool {
		h := fnv.New64a()
		fmt.Fprintf(h, "%s %s", c.Field, c.Kind)
		return h.Sum64()%uint64(nth) == seed%uint64(nth)
	}
}

// Every field of every image is changed by every kind of value. What the checks before CRIU let
// through is restored for real: it is refused with a reason, or nothing of the host is changed, what
// was restored is as the spec has it (the shim inspects it), and nothing is left of it.
func TestEveryField(t *testing.T) {
	z := newZoo(t, checking)
	restoreEach(t, z, chosen(t, 150), false, func(dir string) error { return guard.Images(t.Context(), z.spec, criu.Open(dir), t.TempDir()) })
}

// The same without the checks before CRIU, for what they refuse: CRIU's sandbox and the inspection
// are enough for these changes. CRIU may crash at what the checks keep from it: that is contained, and the
// error says so.
func TestEveryFieldUnchecked(t *testing.T) {
	z := newZoo(t, shared)
	restoreEach(t, z, chosen(t, 400), true, func(string) error { return nil })
}

// trial is a change that is restored.
type trial struct {
	change imagetest.Change
	failed error
	wrong  []string
}

// trials are the changes that are restored, some at once.
type trials struct {
	z     *zoo
	c     *canaries
	cages int
	all   []*trial
	alone sync.RWMutex // held for reading while a change is restored beside others
	mu    sync.Mutex
	// suspects are the changes that run, and those after which something was wrong.
	suspects []*trial
}

// restore restores a change beside others. If anything is wrong afterwards, each change that may have
// done it is restored again, alone and in a new container. So a change is to blame only for what is wrong
// again: not for what others do to the machine meanwhile, nor for a container that another one has
// spoilt. restore returns the container for the next change.
func (s *trials) restore(t *testing.T, g *cage, change imagetest.Change) *cage {
	r := &trial{change: change}
	s.alone.RLock()
	s.mu.Lock()
	s.all, s.suspects = append(s.all, r), append(s.suspects, r)
	s.mu.Unlock()
	r.wrong, r.failed = g.restore(t, change.File, change.Image)
	spoilt := len(r.wrong) > 0
	r.wrong = append(r.wrong, s.c.changed()...)
	if len(r.wrong) == 0 {
		s.mu.Lock()
		s.suspects = slices.DeleteFunc(s.suspects, func(o *trial) bool { return o == r })
		s.mu.Unlock()
		r.change.Image = nil
	}
	s.alone.RUnlock()
	if len(r.wrong) > 0 {
		s.alone.Lock()
		defer s.alone.Unlock()
		s.again(t)
	}
	if spoilt {
		g = s.newCage(t)
	}
	return g
}

func (s *trials) newCage(t *testing.T) *cage {
	s.cages++
	return s.z.newCage(t, s.cages)
}

// again restores the suspects again, three times each or until something is wrong. Nothing else runs.
func (s *trials) again(t *testing.T) {
	for _, r := range s.suspects {
		first := r.wrong
		r.wrong = nil
		for range 3 {
			s.c.before = s.c.look()
			if r.wrong, r.failed = s.newCage(t).restore(t, r.change.File, r.change.Image); len(r.wrong) > 0 {
				r.wrong = append(r.wrong, s.z.c.LogTail(2000))
			}
			if r.wrong = append(r.wrong, s.c.changed()...); len(r.wrong) > 0 {
				break
			}
		}
		if len(r.wrong) == 0 && len(first) > 0 {
			t.Logf("%v: three times alone nothing is wrong; beside others it was: %v", r.change, first)
		}
		r.change.Image = nil
	}
	s.suspects, s.c.before = nil, s.c.look()
}

// restoreEach restores every chosen change of a dump that check lets through. crashes says that CRIU may crash.
func restoreEach(t *testing.T, z *zoo, choose func(imagetest.Change) bool, crashes bool, check func(dir string) error) {
	s := &trials{z: z, c: newCanaries(t)}
	cages := []*cage{s.newCage(t), s.newCage(t)}
	s.c.keep(t, func() {
		for _, g := range cages {
			if wrong, failed := g.restore(t, "", nil); failed != nil || len(wrong) > 0 {
				t.Fatalf("the dump as it was: %v, %v\n%s", failed, wrong, z.c.LogTail(4000))
			}
		}
	})
	dir := t.TempDir()
	if out, err := exec.Command("cp", "-a", z.dir+"/.", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	var wg sync.WaitGroup
	queue := make(chan imagetest.Change)
	for _, g := range cages {
		wg.Go(func() {
			for change := range queue {
				g = s.restore(t, g, change)
			}
		})
	}
	changes, refused := 0, 0
	started := time.Now()
	tried, _, err := imagetest.Each(dir, s.c.paths(), func(change imagetest.Change) bool {
		if !choose(change) || t.Context().Err() != nil {
			return false
		}
		changes++
		undo, err := change.Put(dir)
		if err != nil {
			t.Fatal(err)
		}
		err = check(dir)
		if err := undo(); err != nil {
			t.Fatal(err)
		}
		if err != nil {
			refused++
			return true
		}
		queue <- change
		return false
	})
	close(queue)
	wg.Wait()
	if err != nil {
		t.Fatal(err)
	}
	report(t, s.all)
	escapes, crashed := 0, 0
	for _, r := range s.all {
		if len(r.wrong) > 0 {
			escapes++
			t.Errorf("%v: the restore said %v, and: %v", r.change, r.failed, r.wrong)
		} else if r.failed != nil && strings.Contains(r.failed.Error(), crash) {
			if crashed++; !crashes || !strings.Contains(r.failed.Error(), byKernel) {
				t.Errorf("%v: CRIU crashes: %v", r.change, r.failed)
			}
		} else if r.failed != nil && !clear(r.failed) {
			t.Errorf("%v: the error does not say why: %v", r.change, r.failed)
		}
	}
	if changes == 0 {
		t.Error("no change was tried")
	}
	maps.DeleteFunc(tried, func(name protoreflect.FullName, _ int) bool { return image.Fields()[name].May == "" })
	t.Logf("%d fields x kinds, of which %d changes were tried: %d refused by name, %d accepted, %d restored for real (%v each), of which CRIU crashed at %d; %d escapes",
		len(tried), changes, refused, changes-refused, len(s.all), (time.Since(started) / time.Duration(max(1, len(s.all)))).Round(time.Millisecond), crashed, escapes)
}

// What an error has of a CRIU that has crashed or was killed, and how it says by what.
const (
	crash    = "CRIU was killed or has crashed"
	byKernel = "the kernel says \""
)

// clear reports whether an error says more than that CRIU has failed.
func clear(err error) bool {
	text := err.Error()
	for _, words := range []string{"CRIU said: ", "does not fit the container's spec", "gpuckpt does not restore it", "damaged checkpoint", "restored process", "of the restored container", "CRIU hangs", "was killed while CRIU had it", "does not hold it now", "cannot take it again"} {
		if strings.Contains(text, words) {
			return true
		}
	}
	return false
}

var numbers = regexp.MustCompile(`0x[0-9a-f]+|[0-9]+`)

// report writes how the restores ended: how many of each kind, and each one into a file that is named.
func report(t *testing.T, trials []*trial) {
	t.Helper()
	kinds := make(map[string]int)
	var all strings.Builder
	for _, r := range trials {
		kind := "restored, and harmless"
		if r.failed != nil {
			_, said, ok := strings.Cut(r.failed.Error(), "CRIU said: ")
			if !ok {
				said = r.failed.Error()
			}
			kind = numbers.ReplaceAllString(said[:min(len(said), 90)], "N")
		}
		kinds[kind]++
		fmt.Fprintf(&all, "%v\t%v\t%v\n", r.change, r.failed, r.wrong)
	}
	for _, kind := range slices.SortedFunc(maps.Keys(kinds), func(a, b string) int { return kinds[b] - kinds[a] }) {
		t.Logf("%5d %s", kinds[kind], kind)
	}
	if path := os.Getenv("GPUCKPT_HOSTILE_LOG"); path != "" {
		if err := os.WriteFile(path+"."+harness.Name(t), []byte(all.String()), 0o644); err != nil {
			t.Error(err)
		}
	}
}
