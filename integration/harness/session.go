// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
)

// EnvDir names the directory in which a session's instances keep their data.
const EnvDir = "GPUCKPT_TEST_DIR"

// Session is one run of a package's tests: the programs under test, the
// machine's GPU, and what is noted of the tests. Main makes it; it ends with the
// program, and everything that was started in it ends before.
type Session struct {
	Bins    Bins
	GPU     GPU
	Results *Results

	ctx   context.Context
	atEnd []func() error
}

// Main runs the tests of a package, after what prepares them, and ends the
// program: it is all of a TestMain, and run is the Run of its *testing.M. The
// program fails if the tests do, and if prepare or what was left to AtEnd does;
// Ctrl-C ends it in order.
func Main(run func() int, prepare func(*Session) error) {
	os.Exit(Interruptible(func(ctx context.Context) int {
		code, err := session(ctx, run, prepare)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return max(code, 1)
		}
		return code
	}))
}

// MainShared is Main for a package whose tests share one containerd with the workload's
// image. take receives both before the first test. After the last one left lists the
// files that no test may leave behind; any fails the program. left may be nil.
func MainShared(run func() int, take func(*Session, *Containerd), left func(*Containerd) []string) {
	Main(run, func(s *Session) error {
		shared, err := s.StartWithWorkload(Options{})
		if err != nil {
			return err
		}
		take(s, shared)
		s.AtEnd(func() error {
			if left == nil {
				return nil
			}
			if files := left(shared); len(files) > 0 {
				return fmt.Errorf("left by the tests: %v", files)
			}
			return nil
		})
		return nil
	})
}

// keepInherited keeps from the programs that this one starts what it was started with beside its standard files. CRIU
// dumps no process that has a lock of somebody else's, such as that of flock(1).
func keepInherited() error {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return fmt.Errorf("look for inherited files: %w", err)
	}
	for _, f := range open {
		if fd, err := strconv.Atoi(f.Name()); err == nil && fd > 2 {
			unix.CloseOnExec(fd)
		}
	}
	return nil
}

// session is Main without the end of the program.
func session(ctx context.Context, run func() int, prepare func(*Session) error) (code int, err error) {
	s := &Session{ctx: ctx}
	if err := keepInherited(); err != nil {
		return 1, err
	}
	if s.Bins, err = FindBins(); err != nil {
		return 1, fmt.Errorf("%w; `make test` and `make test-kubernetes` set it", err)
	}
	if s.GPU, err = DetectGPU(s.Bins); err != nil {
		return 1, err
	}
	fmt.Printf("GPU: %s, driver %s, %d device(s)\n", s.GPU.Kind, s.GPU.Driver, len(s.GPU.Devices))
	s.Results = NewResults(ctx, s.Bins, s.GPU)
	defer func() {
		for _, end := range slices.Backward(s.atEnd) {
			err = errors.Join(err, end())
		}
	}()
	if err := prepare(s); err != nil {
		return 1, err
	}
	code = run()
	if len(s.Results.Tests) == 0 { // the package notes none, or none of them ran
		return code, nil
	}
	path, err := s.Results.Write()
	if path != "" {
		fmt.Println("results:", path)
	}
	return code, err
}

// Context ends when the tests are interrupted. What a test's cleanup has to
// remove is started with it: a test's own context ends before that.
func (s *Session) Context() context.Context { return s.ctx }

// AtEnd has a function called when all tests have ended, those given last first.
// Its error fails the program.
func (s *Session) AtEnd(check func() error) { s.atEnd = append(s.atEnd, check) }

// Start starts a containerd that serves the whole session, and stops it at its
// end.
func (s *Session) Start(opts Options) (*Containerd, error) {
	c, err := s.start(opts)
	if err == nil {
		s.AtEnd(c.Stop)
	}
	return c, err
}

// StartWithWorkload is Start with the workload's image in it.
func (s *Session) StartWithWorkload(opts Options) (*Containerd, error) {
	c, err := s.Start(opts)
	if err == nil {
		err = c.ImportWorkload(s.ctx)
	}
	return c, err
}

// Own starts a containerd with the workload's image for one test, and stops it
// when the test ends.
func (s *Session) Own(t T, opts Options) *Containerd {
	t.Helper()
	c, err := s.start(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Stop(); err != nil {
			t.Error(err)
		}
	})
	if err := c.ImportWorkload(s.ctx); err != nil {
		t.Fatal(err)
	}
	return c
}

// start starts a containerd on the session's GPU, and of its programs, unless
// others are named. What its shims leave on a machine goes with it.
func (s *Session) start(opts Options) (*Containerd, error) {
	if opts.Bins.dirs == nil {
		opts.Bins = s.Bins
	}
	if opts.GPU.Kind == NoGPU {
		opts.GPU = s.GPU
	}
	opts.Dir = os.Getenv(EnvDir)
	c, err := Start(s.ctx, opts)
	if err != nil {
		return nil, err
	}
	if err := c.ConfigureShim(opts.ShimConfig); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}
