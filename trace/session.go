// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trace

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// TracerName is the name (argv[0]) under which an executable is a tracer.
const TracerName = "gpuckpt-tracer"

// ErrTracerGone says that the tracer ended before it was asked to: the threads
// it held have been let go.
var ErrTracerGone = errors.New("tracer process ended early; the threads it held run on")

// endTimeout bounds the wait for a tracer that was told to end. It only has to
// return from main; the kernel detaches the threads as it exits.
const endTimeout = 10 * time.Second

// callTimeout bounds one order. The longest copies or digests all GPU state:
// 30 minutes is 64 GiB at 40 MB/s.
const callTimeout = 30 * time.Minute

// Run starts a command and returns what waits for it, as cuda.Options.Run: a
// program that reaps all its children passes its reaper.
type Run func(*exec.Cmd) (wait func() (int, error), err error)

// Session is a running tracer. Its calls take turns. All pids and tids are as
// this process counts them. A call that fails with ErrTracerGone has let go of
// every thread; Close is then all that is left to do.
type Session struct {
	cmd    *exec.Cmd
	pid    int
	quick  bool // Quicken was called, and Calm was not yet
	stdin  io.WriteCloser
	lines  chan []byte // the tracer's answers; closed at its end
	exited chan struct{}
	stderr tail

	mu sync.Mutex
}

// Start starts a tracer; it touches nothing until it is told to. cgroup, if it is
// not nil, is the directory of the cgroup (version 2) to start it in: to move it
// there takes the kernel some 20 ms.
func Start(run Run, cgroup *os.File) (*Session, error) {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{TracerName}
	cmd.Env = []string{} // it needs none, and GODEBUG and the like are not for it
	if cgroup != nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd())}
	}
	s := &Session{cmd: cmd, lines: make(chan []byte, 1), exited: make(chan struct{})}
	cmd.Stderr = &s.stderr
	cmd.WaitDelay = time.Second
	var err error
	if s.stdin, err = cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start the tracer: %w", err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start the tracer: %w", err)
	}
	wait, err := run(cmd)
	if err != nil {
		return nil, fmt.Errorf("start the tracer: %w", err)
	}
	s.pid = cmd.Process.Pid
	go func() {
		// The answers are read to their end before wait, which closes the pipe.
		r := bufio.NewReader(stdout)
		for {
			line, err := r.ReadBytes('\n')
			if err != nil {
				break
			}
			s.lines <- line
		}
		close(s.lines)
		_, _ = wait() // how it ended, Close and the next call tell
		close(s.exited)
	}()
	return s, nil
}

// Pid is the tracer's process id.
func (s *Session) Pid() int { return s.pid }

// Hold seizes every thread of the processes except those named, and returns
// once each has been asked to stop. The processes must be frozen by their
// cgroup: then each thread stops before it executes another instruction in
// user space when the cgroup is thawed. Copiers that a dead tracer has left are
// not held: they do nothing but wait for a copy, and end.
//
// On an error nothing is held. A thread that another tracer (a debugger,
// strace, CRIU) has is an error that names it.
func (s *Session) Hold(processes, except []int) error {
	_, err := s.call("hold threads", order{Op: opHold, Processes: processes, Except: except})
	return err
}

// Release lets go of the threads that Hold holds, which run on unless their
// cgroup is frozen.
func (s *Session) Release() error {
	_, err := s.call("release threads", order{Op: opRelease})
	return err
}

// Steer traces the target's thread from now on: the staging area that it maps
// is backed by a file, see the package. What it maps in another way is left
// alone. The process may be frozen.
func (s *Session) Steer(t Target) error {
	_, err := s.call(fmt.Sprintf("steer thread %d of process %d", t.TID, t.PID), order{Op: opSteer, Target: t})
	return err
}

// Settle stops the steered threads with their areas complete and in place, and
// gives these. Who opens their files then has what is in them, whatever becomes
// of the tracer. Collect or Abandon is to follow, after an error Abandon. The
// processes must not be frozen.
func (s *Session) Settle() ([]Area, error) {
	r, err := s.call("settle staging areas", order{Op: opSettle})
	return r.Areas, err
}

// Collect ends all steering. It puts empty areas in the place of the steered
// ones and gives those, and notes for the log. The processes must not be
// frozen. On an error some areas may be empty: their files are all there is of
// them, and are given too, unless the tracer is gone: see Settle.
func (s *Session) Collect() (areas []Area, notes []string, err error) {
	r, err := s.call("collect staging areas", order{Op: opCollect})
	return r.Areas, r.Notes, err
}

// Abandon ends all steering and leaves the steered areas as they are, with
// their files: the files' names are gone, their content stays with the
// processes.
func (s *Session) Abandon() error {
	_, err := s.call("abandon staging areas", order{Op: opAbandon})
	return err
}

// Map maps files over areas, each by a call in the thread named, which must
// not be frozen nor held. Mappings of different processes happen at once. On an
// error any of them may be done; doing them again does no harm.
func (s *Session) Map(mappings []Mapping) error {
	_, err := s.call("map staging areas", order{Op: opMap, Mappings: mappings})
	return err
}

// Quicken has the drivers of processes copy by so many threads each, the driver's
// own among them, until Calm; the threads named, one of each process, make the
// calls for that. They must not be frozen nor held. Where it cannot be done the
// driver copies by itself, and a note says why.
func (s *Session) Quicken(threads []Thread, copiers int) (notes []string, err error) {
	s.quick = true
	r, err := s.call("quicken copies", order{Op: opQuicken, Threads: threads, Copiers: copiers})
	return r.Notes, err
}

// Calm ends what Quicken began, and gives notes for the log. Other threads of the
// processes may run. After an error a process may have its memcpy by code of ours
// still, which does as memcpy does.
func (s *Session) Calm() (notes []string, err error) {
	if !s.quick {
		return nil, nil
	}
	s.quick = false
	r, err := s.call("end quickened copies", order{Op: opCalm})
	return r.Notes, err
}

// Digest gives the digest of each block of each range (images.DigestBlock), in
// parallel over all of them.
func (s *Session) Digest(files []FileRange) ([][]string, error) {
	r, err := s.call("digest GPU state", order{Op: opDigest, Files: files})
	return r.Digests, err
}

// Copy copies ranges to the files To in parallel and flushes them, and gives
// their digests as Digest does. The ranges are memory. On an error a To may be
// there in part.
func (s *Session) Copy(files []FileRange) ([][]string, error) {
	r, err := s.call("copy GPU state", order{Op: opCopy, Files: files})
	return r.Digests, err
}

// Check reads the areas from their files and compares each block's digest. The
// error names the first blocks that are wrong, and their files.
func (s *Session) Check(areas []images.Area) error {
	o := order{Op: opCheck, Areas: areas}
	for _, a := range areas {
		o.Places = append(o.Places, a.Location)
	}
	_, err := s.call("check GPU state", o)
	return err
}

// Alive says whether the tracer is still there.
func (s *Session) Alive() bool {
	select {
	case <-s.exited:
		return false
	default:
		return true
	}
}

// Kill ends the tracer at once, whatever it does: a call under way fails with
// ErrTracerGone. Close is then still to be called.
func (s *Session) Kill() {
	if s.Alive() {
		s.cmd.Process.Kill()
	}
}

// Close ends the tracer, which lets go of everything. Its error is
// ErrTracerGone when the tracer had ended before.
func (s *Session) Close() error {
	var err error
	select {
	case <-s.exited:
		err = s.gone()
	default:
	}
	s.stdin.Close()
	select {
	case <-s.exited:
	case <-time.After(endTimeout):
		s.cmd.Process.Kill()
		<-s.exited
	}
	return err
}

func (s *Session) call(doing string, o order) (reply, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	line, err := json.Marshal(o)
	if err != nil {
		return reply{}, fmt.Errorf("%s: %w", doing, err)
	}
	if _, err := s.stdin.Write(append(line, '\n')); err != nil {
		<-s.exited // the pipe is closed by its end only
		return reply{}, fmt.Errorf("%s: %w", doing, s.gone())
	}
	limit := time.NewTimer(callTimeout)
	defer limit.Stop()
	select {
	case answer, ok := <-s.lines:
		if !ok {
			<-s.exited
			return reply{}, fmt.Errorf("%s: %w", doing, s.gone())
		}
		var r reply
		if err := json.Unmarshal(answer, &r); err != nil {
			return reply{}, fmt.Errorf("%s: tracer answered %q: %w", doing, answer, err)
		}
		if r.Error != "" {
			return r, fmt.Errorf("%s: %s", doing, r.Error)
		}
		return r, nil
	case <-limit.C:
		s.cmd.Process.Kill()
		<-s.exited
		return reply{}, fmt.Errorf("%s: took longer than %v: %w", doing, callTimeout, s.gone())
	}
}

// gone is ErrTracerGone and what the tracer printed last.
func (s *Session) gone() error {
	if said := s.stderr.String(); said != "" {
		return fmt.Errorf("%w: %s", ErrTracerGone, said)
	}
	return ErrTracerGone
}

// IsTracer says whether this process was started to be a tracer: main then
// calls Main and nothing else.
func IsTracer() bool {
	return len(os.Args) == 1 && os.Args[0] == TracerName
}

// tail keeps the last bytes written to it.
type tail struct {
	mu  sync.Mutex
	end []byte
}

func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(t.end, p...)
	t.end = t.end[max(0, len(t.end)-1024):]
	return len(p), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.end))
}
