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
	"github.com/gpuckpt/gpuckpt/integration/hostile/trials"
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

// restoreEach restores every chosen change of a dump that check lets through. crashes says that CRIU may crash.
func restoreEach(t *testing.T, z *zoo, choose func(imagetest.Change) bool, crashes bool, check func(dir string) error) {
	c, made := newCanaries(t), 0
	s := &trials.Trials{Host: &c.Kept, Log: func() string { return z.c.LogTail(2000) }, New: func(t *testing.T) trials.Place {
		made++
		return z.newCage(t, made)
	}}
	places := []trials.Place{s.New(t), s.New(t)}
	c.keep(t, func() {
		for _, g := range places {
			if wrong, failed := g.Restore(t, "", nil); failed != nil || len(wrong) > 0 {
				t.Fatalf("the dump as it was: %v, %v\n%s", failed, wrong, z.c.LogTail(4000))
			}
		}
	})
	dir := t.TempDir()
	if out, err := exec.Command("cp", "-a", z.dir+"/.", dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	queue, wait := restoring(t, s, places...)
	changes, refused := 0, 0
	started := time.Now()
	tried, _, err := imagetest.Each(dir, c.paths(), func(change imagetest.Change) bool {
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
	wait()
	if err != nil {
		t.Fatal(err)
	}
	all, since := s.All()
	report(t, all)
	escapes, crashed := 0, 0
	for _, r := range all {
		if len(r.Wrong) > 0 {
			escapes++
			t.Errorf("%v: the restore said %v, and: %v", r.Change, r.Failed, r.Wrong)
		} else if r.Failed != nil && strings.Contains(r.Failed.Error(), crash) {
			if crashed++; !crashes || !strings.Contains(r.Failed.Error(), byKernel) {
				t.Errorf("%v: CRIU crashes: %v", r.Change, r.Failed)
			}
		} else if r.Failed != nil && !clear(r.Failed) {
			t.Errorf("%v: the error does not say why: %v", r.Change, r.Failed)
		}
	}
	if len(since) > 0 {
		t.Errorf("after the last change: %v", since)
	}
	if changes == 0 {
		t.Error("no change was tried")
	}
	maps.DeleteFunc(tried, func(name protoreflect.FullName, _ int) bool { return image.Fields()[name].May == "" })
	t.Logf("%d fields x kinds, of which %d changes were tried: %d refused by name, %d accepted, %d restored for real (%v each), of which CRIU crashed at %d; %d escapes",
		len(tried), changes, refused, changes-refused, len(all), (time.Since(started) / time.Duration(max(1, len(all)))).Round(time.Millisecond), crashed, escapes)
}

// restoring restores the changes of a queue, in several places at once, until wait is called.
func restoring(t *testing.T, s *trials.Trials, places ...trials.Place) (_ chan<- imagetest.Change, wait func()) {
	var wg sync.WaitGroup
	queue := make(chan imagetest.Change)
	for _, g := range places {
		wg.Go(func() {
			defer func() { // a test that has failed is not waited for
				for range queue {
				}
			}()
			for change := range queue {
				g = s.Restore(t, g, change)
			}
		})
	}
	return queue, func() {
		close(queue)
		wg.Wait()
	}
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
func report(t *testing.T, all []*trials.Trial) {
	t.Helper()
	kinds := make(map[string]int)
	var list strings.Builder
	for _, r := range all {
		kind := "restored, and harmless"
		if r.Failed != nil {
			_, said, ok := strings.Cut(r.Failed.Error(), "CRIU said: ")
			if !ok {
				said = r.Failed.Error()
			}
			kind = numbers.ReplaceAllString(said[:min(len(said), 90)], "N")
		}
		kinds[kind]++
		fmt.Fprintf(&list, "%v\t%v\t%v\n", r.Change, r.Failed, r.Wrong)
	}
	for _, kind := range slices.SortedFunc(maps.Keys(kinds), func(a, b string) int { return kinds[b] - kinds[a] }) {
		t.Logf("%5d %s", kinds[kind], kind)
	}
	if path := os.Getenv("GPUCKPT_HOSTILE_LOG"); path != "" {
		if err := os.WriteFile(path+"."+harness.Name(t), []byte(list.String()), 0o644); err != nil {
			t.Error(err)
		}
	}
}
