// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package zdtm

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/cio"
	"github.com/containerd/typeurl/v2"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
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
)

var (
	session *harness.Session
	shared  *harness.Containerd
	suite   []Test
	commit  string
	// user makes tests run as the suite's own user, where CRIU can dump processes of users.
	user []string
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
		if user, err = suiteUser(); err != nil {
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

// suiteUser is the environment that makes a test change to a user.
func suiteUser() ([]string, error) {
	status, err := proc.StatusOf(os.Getpid())
	if err != nil {
		return nil, err
	}
	var have uint64
	if _, err := fmt.Sscanf(status.Field("CapEff"), "%x", &have); err != nil {
		return nil, err
	}
	if have&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		fmt.Println("all tests run as root: without CAP_SYS_RESOURCE CRIU cannot dump the limits of another user's process")
		return nil, nil
	}
	return []string{"ZDTM_UID=18943", "ZDTM_GID=58467", "ZDTM_GROUPS=27495 48244"}, nil
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
	log := openLog(t)
	for _, test := range suite {
		t.Run(test.Name, func(t *testing.T) {
			t.Parallel()
			result, has := log.old[test.Name]
			if !has {
				result = Result{Test: test.Name, Commit: commit, Skipped: test.Skip}
				if test.Skip == "" {
					try(t, test, &result)
				}
				if err := context.Cause(session.Context()); err != nil {
					t.Fatal(err)
				}
				log.add(t, result)
			}
			if err := result.Judge(); err != nil {
				t.Error(err)
			}
		})
	}
}

// log has the results of this run, and those of earlier ones of this commit, which are not run again.
type log struct {
	old  map[string]Result
	mu   sync.Mutex
	file *os.File // nil for none
}

func openLog(t *testing.T) *log {
	path := os.Getenv(envLog)
	if path == "" {
		return &log{}
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	old, err := Read(file)
	if err != nil {
		t.Fatal(err)
	}
	maps.DeleteFunc(old, func(_ string, r Result) bool { return r.Commit != commit || strings.HasSuffix(commit, "-dirty") })
	return &log{file: file, old: old}
}

func (l *log) add(t *testing.T, r Result) {
	if l.file == nil {
		return
	}
	line, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, err := l.file.Write(append(line, '\n')); err != nil {
		t.Fatal(err)
	}
}

// try runs a test: the sample, which passes with runc's shim, by this project's alone.
func try(t *testing.T, test Test, result *Result) {
	beside := os.Getenv(envTests) != ""
	if session.Context().Err() != nil {
		return
	}
	if beside {
		first := there(t, test, harness.RuncRuntime, Place, false)
		if !first.Passed() {
			err := alone(t, test, false)
			if result.Privileged = err != nil; result.Privileged {
				err = alone(t, test, true)
			}
			if err != nil {
				result.Skipped = "fails without a checkpoint: " + short(err)
				return
			}
			if result.Privileged {
				first = there(t, test, harness.RuncRuntime, Place, true)
			}
		}
		result.Runc = map[string]*Outcome{Place: first, Image: there(t, test, harness.RuncRuntime, Image, result.Privileged)}
	}
	result.Ours = make(map[string]*Outcome)
	for _, way := range Ways {
		result.Ours[way] = there(t, test, harness.Runtime, way, result.Privileged)
	}
}

// alone reports how a test fails that is not checkpointed.
func alone(t *testing.T, test Test, privileged bool) error {
	r := newRun(t, test, harness.RuncRuntime, "alone", privileged)
	defer r.end(t)
	if err := r.start(); err != nil {
		return err
	}
	return r.verdict()
}

// there takes a test there and back.
func there(t *testing.T, test Test, runtime, way string, privileged bool) *Outcome {
	if runtime == harness.RuncRuntime && strings.Contains(hangs, " "+test.Name+" ") {
		return &Outcome{Failed: "checkpoint", Error: untried}
	}
	r := newRun(t, test, runtime, way, privileged)
	defer r.end(t)
	if err := r.start(); err != nil {
		return &Outcome{Failed: "start", Error: short(err)}
	}
	outcome := &Outcome{}
	checkpoint, restore := r.checkpointInto, r.restoreFrom
	if way == Image {
		checkpoint, restore = r.checkpointImage, r.restoreImage
	}
	err := timed(&outcome.Checkpoint, checkpoint)
	if err != nil {
		outcome.Failed, outcome.Error = "checkpoint", short(err)
		outcome.RunsOn = r.verdict() == nil
		return outcome
	}
	if outcome.Size, err = r.size(); err != nil {
		t.Fatal(err)
	}
	if err := r.leave(); err != nil {
		t.Fatal(err)
	}
	if err := timed(&outcome.Restore, restore); err != nil {
		outcome.Failed, outcome.Error = "restore", short(err)
	} else if err := r.verdict(); err != nil {
		outcome.Failed, outcome.Error = "verdict", short(err)
	}
	return outcome
}

func timed(seconds *float64, do func() error) error {
	began := time.Now()
	err := do()
	*seconds = float64(time.Since(began).Milliseconds()) / 1000
	return err
}

// short is the end of an error's text, for results, without the instance's directory.
func short(err error) string {
	text := []rune(strings.ReplaceAll(strings.TrimSpace(err.Error()), shared.Dir(), ""))
	return string(text[max(0, len(text)-600):])
}

// run is a test in a container.
type run struct {
	ctx     context.Context
	cancel  context.CancelFunc
	test    Test
	way     string
	spec    harness.RunSpec
	k       *harness.Container
	network string
	dir     string
	ref     string
}

func newRun(t *testing.T, test Test, runtime, way string, privileged bool) *run {
	t.Helper()
	id := strings.NewReplacer("_", "-", "+", "-plus").Replace(strings.ToLower(test.Name)) + "-" + strings.Split(runtime, ".")[2] + "-" + way[:2]
	r := &run{test: test, way: way, network: filepath.Join(shared.Dir(), "net-"+id), dir: filepath.Join(shared.Dir(), "dump-"+id), ref: "checkpoint.test/" + id + ":1"}
	r.ctx, r.cancel = context.WithTimeout(t.Context(), 3*time.Minute)
	// As a pod's: it outlives the container.
	if err := harness.NewNetwork(r.network); err != nil {
		t.Fatal(err)
	}
	r.spec = harness.RunSpec{
		ID: id, Runtime: runtime, Image: image, OwnNetwork: true, CtrFlags: []string{"--with-ns", "network:" + r.network},
		Args: append([]string{"/zdtm/init"}, test.Args...), Env: []string{"TMPDIR=/tmp", "ZDTM_THREAD_BOMB=5"},
	}
	if privileged {
		r.spec.CtrFlags = append(r.spec.CtrFlags, "--privileged")
	}
	if !slices.Contains(test.Flags, "suid") {
		r.spec.Env = append(r.spec.Env, user...)
	}
	if runtime == harness.RuncRuntime {
		// This project's shim chooses for itself.
		lines := slices.Clone(test.Options)
		if !slices.ContainsFunc(lines, func(line string) bool { return strings.HasPrefix(line, "network-lock") }) {
			lines = append(lines, "network-lock nftables")
		}
		config := filepath.Join(t.TempDir(), id)
		if err := os.WriteFile(config, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		r.spec.Annotations = map[string]string{"org.criu.config": config}
	}
	return r
}

// end removes all of it.
func (r *run) end(t *testing.T) {
	t.Helper()
	r.cancel()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	err := shared.Remove(ctx, r.spec.ID)
	if r.way == Image {
		_, removed := shared.Ctr(ctx, "images", "rm", r.ref)
		err = errors.Join(err, removed)
	}
	if err := errors.Join(err, unix.Unmount(r.network, unix.MNT_DETACH), os.Remove(r.network), os.RemoveAll(r.dir)); err != nil {
		t.Error(err)
	}
}

// file is the path of a file of the test's, while its container runs.
func (r *run) file(suffix string) (string, error) {
	pid, err := r.k.Pid(r.ctx)
	return fmt.Sprintf("/proc/%d/root%s%s.%s", pid, static, r.test.Name, suffix), err
}

// start runs the container until the test is ready for its checkpoint.
func (r *run) start() (err error) {
	if r.k, err = shared.Run(r.ctx, r.spec); err != nil {
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
		_, status, ended := strings.Cut(r.k.Logs(), "started: ")
		if ended && !strings.HasPrefix(status, "0") || time.Since(began) > patience {
			text, _ := os.ReadFile(strings.TrimSuffix(ready, "pid") + "out")
			more, _ := os.ReadFile(strings.TrimSuffix(ready, "pid") + "out.inprogress")
			return fmt.Errorf("it does not start: %s%s%s", r.k.Logs(), text, more)
		}
	}
}

// verdict asks the test whether all is as it was.
func (r *run) verdict() error {
	pid, err := r.k.Pid(r.ctx)
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

// checkpointInto is the shim's Checkpoint with exit, as nerdctl and Docker ask for it.
func (r *run) checkpointInto() error {
	if err := os.Mkdir(r.dir, 0o700); err != nil {
		return err
	}
	with, err := typeurl.MarshalAnyToProto(&options.CheckpointOptions{Exit: true, ImagePath: r.dir})
	if err != nil {
		return err
	}
	_, err = shared.Client().TaskService().Checkpoint(r.ctx, &tasks.CheckpointTaskRequest{ContainerID: r.k.ID, Options: with})
	return err
}

func (r *run) restoreFrom() error {
	container, err := shared.Client().LoadContainer(r.ctx, r.k.ID)
	if err != nil {
		return err
	}
	task, err := container.NewTask(r.ctx, cio.LogFile(filepath.Join(shared.Dir(), "logs", r.k.ID+".restored")), client.WithRestoreImagePath(r.dir))
	if err != nil {
		return err
	}
	return task.Start(r.ctx)
}

func (r *run) checkpointImage() error { return r.k.Checkpoint(r.ctx, r.ref) }

func (r *run) restoreImage() (err error) {
	r.k, err = shared.Restore(r.ctx, r.spec.ID, r.ref, 0)
	return err
}

// leave ends what was checkpointed, so that a restore can take its place.
func (r *run) leave() error {
	if r.way == Image {
		return r.k.Remove(r.ctx)
	}
	for {
		status, err := r.k.Status(r.ctx)
		if err != nil {
			return err
		}
		if status == client.Stopped {
			_, err = shared.Ctr(r.ctx, "tasks", "delete", r.k.ID)
			return err
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// size is a checkpoint's: of the files, or of the layers that the image has beside the container's own.
func (r *run) size() (size int64, err error) {
	if r.way == Place {
		err = filepath.WalkDir(r.dir, func(_ string, entry fs.DirEntry, err error) error {
			if err != nil || !entry.Type().IsRegular() {
				return err
			}
			info, err := entry.Info()
			size += info.Size()
			return err
		})
		return size, err
	}
	img, err := shared.Client().ImageService().Get(r.ctx, r.ref)
	if err != nil {
		return 0, err
	}
	err = images.Walk(r.ctx, images.HandlerFunc(func(ctx context.Context, d ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if !images.IsIndexType(d.MediaType) {
			size += d.Size
			return nil, nil
		}
		var index ocispec.Index
		data, err := content.ReadBlob(ctx, shared.Client().ContentStore(), d)
		if err == nil {
			err = json.Unmarshal(data, &index)
		}
		return index.Manifests, err
	}), img.Target)
	return size, err
}
