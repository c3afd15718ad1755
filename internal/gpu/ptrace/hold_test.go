// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package ptrace

import (
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// Threads that end while all are listed hide none of the others.
func TestThreadsThatEndHideNone(t *testing.T) {
	const rounds, listings, ending = 500, 20, 3
	for round := range rounds {
		var all sync.WaitGroup
		begin, end, last := make(chan struct{}), make(chan struct{}), make(chan int)
		for i := range ending {
			ready := make(chan struct{})
			all.Go(func() {
				runtime.LockOSThread() // never unlocked: the thread ends with this function
				close(ready)
				<-begin
				time.Sleep(time.Duration(i) * 20 * time.Microsecond)
			})
			<-ready
		}
		all.Go(func() {
			runtime.LockOSThread()
			last <- unix.Gettid()
			<-end
		})
		tid := <-last
		close(begin)
		for range listings {
			tids, err := Threads(os.Getpid())
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Contains(tids, tid) {
				t.Fatalf("round %d: thread %d lives, and is not in %v", round, tid, tids)
			}
		}
		close(end)
		all.Wait()
	}
}
