// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package zdtm

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/beside"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

const (
	// envTests names the tests to run beside runc's shim, with spaces; "all" runs all.
	envTests = "GPUCKPT_TEST_ZDTM"
	// envLog names the file to which results are added.
	envLog = "GPUCKPT_TEST_ZDTM_LOG"

	image  = "gpuckpt.test/zdtm:latest"
	static = "/zdtm/static/"
	// patience is how long a test may take to start, or to come to its verdict.
	patience = 40 * time.Second
	// tries is how often a test of numbered may get another number: one in two does while others start containers.
	tries = 20
)

var (
	session *harness.Session
	shared  *harness.Containerd
	suite   []Test
	commit  string
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) (err error) {
		session, commit = s, s.Results.Commit
		if shared, err = s.Start(harness.Options{}); err != nil {
			return err
		}
		commands, err := s.Bins.Path("zdtm/commands")
		if err != nil {
			return fmt.Errorf("%w: run hack/setup zdtm", err)
		}
		if suite, err = choose(filepath.Dir(commands)); err != nil {
			return err
		}
		return importSuite(s.Context(), filepath.Dir(commands))
	})
}

// choose returns the tests to run.
func choose(dir string) ([]Test, error) {
	all, err := Load(dir)
	if err != nil {
		return nil, err
	}
	names := strings.Fields(cmp.Or(os.Getenv(envTests), sample))
	if slices.Equal(names, []string{"all"}) {
		return all, nil
	}
	var chosen []Test
	for _, name := range names {
		i := slices.IndexFunc(all, func(t Test) bool { return t.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("CRIU's suite has no test %q", name)
		}
		chosen = append(chosen, all[i])
	}
	return chosen, nil
}

// importSuite makes the image: the tests, their init, and what some of them start.
func importSuite(ctx context.Context, dir string) error {
	first := filepath.Join(shared.Dir(), "init")
	if out, err := exec.CommandContext(ctx, "gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", first, "init/init.c").CombinedOutput(); err != nil {
		return fmt.Errorf("compile init.c: %w: %s", err, out)
	}
	files := map[string]string{"/zdtm/init": first}
	for _, test := range suite {
		if program := filepath.Join(dir, test.Name); test.Skip == "" {
			files[static+test.Name] = program
		}
	}
	for _, program := range []string{"sh", "ip", "diff", "true"} {
		if path, err := exec.LookPath(program); err == nil {
			files["/usr/bin/"+program] = path
		}
	}
	img, err := harness.BuildImage(ctx, harness.ImageSpec{Files: files})
	if err != nil {
		return err
	}
	return shared.Import(ctx, image, img)
}

// What passes with runc's shim passes here.
func TestSuite(t *testing.T) {
	log, err := beside.OpenLog(os.Getenv(envLog), commit)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range suite {
		t.Run(test.Name, func(t *testing.T) {
			t.Parallel()
			result, has := log.Has(test.Name)
			if !has {
				result = beside.Result{Test: test.Name, Commit: commit, Skipped: test.Skip}
				if test.Skip == "" {
					try(t, test, &result)
				}
				if err := context.Cause(session.Context()); err != nil {
					t.Fatal(err)
				}
				if err := log.Add(result); err != nil {
					t.Fatal(err)
				}
			}
			if err := result.Judge(Exceptions); err != nil {
				t.Error(err)
			}
		})
	}
}

// try runs a test: the sample, which passes with runc's shim, by this project's alone.
func try(t *testing.T, test Test, result *beside.Result) {
	if session.Context().Err() != nil {
		return
	}
	if os.Getenv(envTests) != "" {
		first := there(t, test, harness.RuncRuntime, beside.Place, false)
		if !first.Passed() {
			err := alone(t, test, false)
			if result.Privileged = err != nil; result.Privileged {
				err = alone(t, test, true)
			}
			if err != nil {
				result.Skipped = "fails without a checkpoint: " + err.Error()
				return
			}
			if result.Privileged {
				first = there(t, test, harness.RuncRuntime, beside.Place, true)
			}
		}
		result.Runc = map[string]*beside.Outcome{beside.Place: first, beside.Image: there(t, test, harness.RuncRuntime, beside.Image, result.Privileged)}
	}
	result.Ours = make(map[string]*beside.Outcome)
	for _, way := range beside.Ways {
		result.Ours[way] = there(t, test, harness.Runtime, way, result.Privileged)
	}
}

// alone reports how a test fails that is not checkpointed.
func alone(t *testing.T, test Test, privileged bool) error {
	r := newRun(t, test, harness.RuncRuntime, beside.Place, privileged)
	defer r.end()
	if err := r.start(); err != nil {
		return err
	}
	return r.verdict(0)
}

// there takes a test there and back, one of numbered until the number is the old one.
func there(t *testing.T, test Test, runtime, way string, privileged bool) *beside.Outcome {
	if runtime == harness.RuncRuntime && strings.Contains(hangs, " "+test.Name+" ") {
		return &beside.Outcome{Failed: "checkpoint", Error: untried}
	}
	for try := 1; ; try++ {
		outcome, renumbered := once(t, test, runtime, way, privileged)
		if !renumbered || way != beside.Place || !strings.Contains(numbered, " "+test.Name+" ") || try == tries {
			return outcome
		}
	}
}

// once takes a test there and back, and reports whether its root file system has another device number then.
func once(t *testing.T, test Test, runtime, way string, privileged bool) (_ *beside.Outcome, renumbered bool) {
	r := newRun(t, test, runtime, way, privileged)
	defer r.end()
	if err := r.start(); err != nil {
		return &beside.Outcome{Failed: "start", Error: r.Short(err)}, false
	}
	before := r.device()
	outcome, err := r.ThereAndBack(1, func(round int) error {
		renumbered = r.device() != before
		return r.verdict(round)
	})
	if err != nil {
		t.Fatal(err)
	}
	return outcome, renumbered
}

// run is a test in a container.
type run struct {
	*beside.Run
	t    *testing.T
	test Test
}

// newRun prepares a run, which must end before another one of the test and runtime begins.
func newRun(t *testing.T, test Test, runtime, way string, privileged bool) *run {
	t.Helper()
	spec := harness.RunSpec{
		ID: strings.NewReplacer("_", "-", "+", "-plus").Replace(strings.ToLower(test.Name)), Runtime: runtime, Image: image,
		Args: append([]string{"/zdtm/init"}, test.Args...), Env: []string{"TMPDIR=/tmp", "ZDTM_THREAD_BOMB=5"},
	}
	if privileged {
		spec.CtrFlags = []string{"--privileged"}
	}
	if !slices.Contains(test.Flags, "suid") {
		spec.Env = append(spec.Env, "ZDTM_UID=18943", "ZDTM_GID=58467", "ZDTM_GROUPS=27495 48244")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	r, err := beside.New(ctx, shared, session.Bins, way, spec, test.Options)
	if err != nil {
		t.Fatal(err)
	}
	return &run{r, t, test}
}

func (r *run) end() {
	if err := r.End(); err != nil {
		r.t.Error(err)
	}
}

// file is the path of a file of the test's, while its container runs.
func (r *run) file(suffix string) (string, error) {
	pid, err := r.Container.Pid(r.t.Context())
	return fmt.Sprintf("/proc/%d/root%s%s.%s", pid, static, r.test.Name, suffix), err
}

// device is the device number of the root file system; 0 of a container that has ended.
func (r *run) device() uint64 {
	var st unix.Stat_t
	if pid, err := r.Container.Pid(r.t.Context()); err == nil {
		_ = unix.Stat(fmt.Sprintf("/proc/%d/root", pid), &st)
	}
	return st.Dev
}

// start runs the container until the test is ready for its checkpoint.
func (r *run) start() error {
	if err := r.Start(); err != nil {
		return err
	}
	ready, err := r.file("pid")
	if err != nil {
		return err
	}
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(ready); err == nil {
			return nil
		}
		_, status, ended := strings.Cut(r.Container.Logs(), "started: ")
		if ended && !strings.HasPrefix(status, "0") || time.Since(began) > patience {
			text, _ := os.ReadFile(strings.TrimSuffix(ready, "pid") + "out")
			more, _ := os.ReadFile(strings.TrimSuffix(ready, "pid") + "out.inprogress")
			return fmt.Errorf("it does not start: %s%s%s", r.Container.Logs(), text, more)
		}
	}
}

// verdict asks the test whether all is as it was.
func (r *run) verdict(int) error {
	pid, err := r.Container.Pid(r.t.Context())
	if err == nil {
		err = unix.Kill(pid, unix.SIGUSR1)
	}
	if err != nil {
		return err
	}
	path, err := r.file("out")
	if err != nil {
		return err
	}
	for began := time.Now(); ; time.Sleep(10 * time.Millisecond) {
		text, err := os.ReadFile(path)
		switch {
		case err == nil && slices.Contains(strings.Fields(string(text)), "PASS"):
			return nil
		case err == nil:
			return fmt.Errorf("it says: %s", text)
		case time.Since(began) > patience:
			text, _ = os.ReadFile(path + ".inprogress")
			return fmt.Errorf("no verdict within %v; it says: %s", patience, text)
		}
	}
}
