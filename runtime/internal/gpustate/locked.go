// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package gpustate

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"

	"github.com/gpuckpt/gpuckpt/cdi"
	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/gpu/ptrace"
	"github.com/gpuckpt/gpuckpt/internal/node/proc"
	"github.com/gpuckpt/gpuckpt/internal/operation/sequence"
	"github.com/gpuckpt/gpuckpt/runtime/internal/cudahelper"
	"github.com/gpuckpt/gpuckpt/runtime/internal/gpustate/internal/gpulist"
)

// locked is what a State knows of the CUDA processes from their lock on.
type locked struct {
	info        cuda.Info
	procs       cuda.Group // by their pids in the container; State is as each was found
	bystanders  bystanders
	took        time.Duration
	use         usage
	copyThreads int

	parked *parked  // before the lock
	path   DataPath // of Preflight
	sizes  []uint64 // bytes of GPU state by place in procs; nil before Save
	areas  []Area   // state that is not in the processes
	lent   []*Lent  // files that the processes read from until they are unlocked
}

// usage is GPU memory in bytes as NVML counts it; the maps are nil if it is not known.
type usage struct {
	byGPU map[string]uint64 // by UUID
	byPID map[int]uint64
}

func (u usage) total() (bytes uint64) {
	for _, n := range u.byGPU {
		bytes += n
	}
	return bytes
}

// lockTries is how often a lock is tried while processes with files of a GPU come up beside it:
// children of PyTorch's compiler, for one, which take milliseconds each.
const lockTries = 5

// lockAll is lock, once more for those that came up meanwhile: candidates returns who is there now.
// After the last try it leaves them for refuseUnlocked.
func (l *locked) lockAll(ctx context.Context, by *cudahelper.Helpers, pids []int, candidates func() ([]int, error), timeout time.Duration) error {
	for try := 1; ; try++ {
		if err := l.lock(ctx, by, pids, timeout); err != nil || len(l.procs)+len(l.bystanders) == 0 {
			return err
		}
		now, err := candidates()
		if err == nil && (try == lockTries || l.refuseUnlocked(now) == nil) {
			return nil
		}
		undo := context.WithoutCancel(ctx) // who has given up must not leave them locked
		helper, herr := by.Get(undo)
		if herr != nil {
			return sequence.Join(err, herr)
		}
		if uerr := l.unlock(undo, helper); uerr != nil || err != nil {
			return sequence.Join(err, uerr)
		}
		log.G(ctx).WithField("try", try).Info("a process began to use a GPU beside the lock: locking again")
		pids = now
	}
}

// unlock unlocks those that have not ended, and undoes park.
func (l *locked) unlock(ctx context.Context, helper *cuda.Helper) error {
	if err := l.procs.Living().Unlock(ctx, helper); err != nil {
		return err
	}
	return l.parked.Open(ctx, l.procs)
}

// lock finds the CUDA processes among pids, parks and locks them.
func (l *locked) lock(ctx context.Context, by *cudahelper.Helpers, pids []int, timeout time.Duration) error {
	if err := refuseStopped(pids); err != nil {
		return err
	}
	helper, err := l.find(ctx, by, pids)
	if err != nil {
		return err
	}
	if p, _ := l.unlisted(); p != nil && by.Visible != nil { // it got a GPU past the spec
		by.Visible = nil
		if helper, err = l.find(ctx, by, pids); err != nil {
			return err
		}
	}
	// The container's order: its own pids, not the host's.
	slices.SortFunc(l.procs, func(a, b cuda.Process) int { return cmp.Compare(a.PID.NS, b.PID.NS) })
	if l.bystanders, err = l.bystandersAmong(pids); err != nil || len(l.procs) == 0 {
		return err
	}
	l.parked = park(ctx, by.Node.Staging, l.procs, timeout)
	var survey sync.WaitGroup
	var unknown error
	survey.Go(func() { l.use, unknown = useOf(ctx, helper, l.procs) }) // which takes as long as the lock
	if err = l.procs.Lock(ctx, helper, timeout); err != nil {
		err = sequence.Join(err, l.parked.Open(ctx, l.procs))
	}
	if survey.Wait(); unknown != nil {
		log.G(ctx).WithError(unknown).Warn("how much GPU memory the processes have is not known: whether there is room for it will be seen")
	}
	return err
}

// refuseStopped refuses processes that may use CUDA and that a signal or a tracer has stopped: the driver
// works by a thread of theirs, and waits for it without end.
func refuseStopped(pids []int) error {
	for _, pid := range pids {
		tids, err := ptrace.Threads(pid)
		if err != nil {
			return err
		}
		for _, tid := range tids {
			if !proc.Stopped(pid, tid) {
				continue
			}
			status, _ := proc.ThreadStatus(pid, tid) // of one that is gone nothing traces
			if tracer := status.TracingProcess(); tracer != 0 {
				return fmt.Errorf("process %s uses a GPU, and process %s (a debugger?) has stopped it: end that one, and try again: %w",
					proc.Describe(pid), proc.Describe(tracer), errdefs.ErrFailedPrecondition)
			}
			return fmt.Errorf("process %s uses a GPU and is stopped (SIGSTOP, or Ctrl-Z at a terminal), and the driver would wait for it: let it go on (kill -CONT %d), and try again: %w",
				proc.Describe(pid), pid, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// find starts the helper and asks it for the GPUs and the processes.
func (l *locked) find(ctx context.Context, by *cudahelper.Helpers, pids []int) (helper *cuda.Helper, err error) {
	if helper, l.info, err = by.Begin(ctx, (*cuda.Helper).Info); err != nil {
		return nil, err
	}
	l.procs, err = cuda.Find(ctx, helper, pids)
	return helper, err
}

// unlisted returns a process that has a GPU open which the helper does not list, or nil.
func (l *locked) unlisted() (p *cuda.Process, minor int) {
	for i, p := range l.procs {
		for _, minor := range p.GPUs {
			if !slices.ContainsFunc(l.info.GPUs, func(d cuda.GPU) bool { return d.Minor == minor }) {
				return &l.procs[i], minor
			}
		}
	}
	return nil, 0
}

// bystanders are processes with files of a GPU and without CUDA state: children that were forked after CUDA or
// NVML began. (The driver serves a user of NVML alone as a CUDA process.) The driver does not checkpoint them,
// and CRIU dumps their files by gpuckpt's plugin. Each has with its pid where it has files of NVIDIA's devices
// mapped: CUDA changes that.
type bystanders map[int]string

func (l *locked) bystandersAmong(pids []int) (bystanders, error) {
	all, processes := make(bystanders), l.procs.Hosts()
	for _, pid := range pids {
		if slices.Contains(processes, pid) {
			continue
		}
		holds, err := cuda.HoldsDevice(pid)
		if err != nil {
			return nil, err
		}
		if !holds {
			continue
		}
		mappings, err := proc.Maps(pid, func(m *proc.Mapping) bool {
			device := strings.HasPrefix(m.Path, "/dev/nvidia")
			m.Path = ""
			return device
		})
		if proc.Ended(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var mapped strings.Builder
		for _, m := range mappings {
			fmt.Fprintf(&mapped, "%x-%x ", m.Start, m.End)
		}
		all[pid] = mapped.String()
	}
	return all, nil
}

// bornWithout reports whether a process came up after the lock and has no files of a GPU but
// those that it was forked with: it cannot use CUDA, and is one more bystander.
func (l *locked) bornWithout(pid int) (bool, error) {
	if _, was := l.bystanders[pid]; was {
		return false, nil // it was there, and has begun to use CUDA
	}
	return cuda.InheritsDevices(pid, slices.AppendSeq(l.procs.Hosts(), maps.Keys(l.bystanders)))
}

// refuseUnlocked refuses a process with files of a GPU that the lock did not see: a program
// that began to use CUDA between the lock and the freeze.
func (l *locked) refuseUnlocked(candidates []int) error {
	now, err := l.bystandersAmong(candidates)
	if err != nil {
		return err
	}
	for _, pid := range slices.Sorted(maps.Keys(now)) {
		if was, known := l.bystanders[pid]; known && now[pid] == was {
			continue
		}
		born, err := l.bornWithout(pid)
		if err != nil {
			return err
		}
		if !born {
			return fmt.Errorf("process %s began to use a GPU while the container was being paused, and is not locked: resume the container and try again: %w",
				proc.Describe(pid), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// RefuseGraphics refuses a process that uses a GPU for graphics. CUDA processes have their GPUs mapped while
// they are locked, and are looked at once the driver has checkpointed them: what they have then stays mapped.
func (s *State) RefuseGraphics() error {
	pids := slices.Sorted(maps.Keys(s.bystanders))
	if s.phase != Locked {
		pids = append(pids, s.procs.Hosts()...)
	}
	for _, pid := range pids {
		draws, err := cuda.UsesGraphics(pid)
		if err != nil {
			return err
		}
		if draws {
			return fmt.Errorf("process %s uses a GPU for graphics (EGL, OpenGL, Vulkan), which nobody can checkpoint: end it before the checkpoint, or have it draw without a GPU: %w",
				proc.Describe(pid), errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

// sharesFrom is the first major version of the driver that restores GPU memory that processes share, for
// programs started with cuda-checkpoint --launch-job. It refuses the others by itself.
const sharesFrom = 610

// refuseShared refuses processes that share GPU memory, by CUDA IPC or by exported handles, and those
// that reach memory of one GPU from another, see refuseReach: an older driver checkpoints them and never
// restores them. It refuses also where the driver does not say what they have. path is that of the driver's.
func (l *locked) refuseShared(ctx context.Context, helper *cuda.Helper, path DataPath) error {
	major, _, _ := strings.Cut(l.info.DriverVersion, ".")
	if n, err := strconv.Atoi(major); err == nil && n >= sharesFrom {
		return nil
	}
	driver := cmp.Or(l.info.DriverVersion, "of unknown version")
	if err := cmp.Or(l.parked.Refusal(), refuseHostMemory(l.procs, driver)); err != nil {
		return err
	}
	for _, p := range l.procs {
		shares, err := cuda.SharingOf(ctx, helper, p)
		if errors.Is(err, cuda.ErrNotReported) {
			return fmt.Errorf("%w: gpuckpt does not know driver %s well enough to checkpoint with it: use one of 570 to 595: %w",
				err, driver, errdefs.ErrFailedPrecondition)
		}
		if err != nil {
			return err
		}
		if shares.Others {
			return fmt.Errorf("process %s shares GPU memory with another process (CUDA IPC, or an exported handle): driver %s would checkpoint it and never restore it; start the program with the annotation %s, or share through host memory (NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0 for NCCL): %w",
				proc.Describe(p.PID.Host), driver, annotations.Interposer, errdefs.ErrFailedPrecondition)
		}
		if shares.Reaches {
			if err := l.refuseReach(p.PID.Host, driver, path); err != nil {
				return err
			}
		}
	}
	return nil
}

// refuseHostMemory refuses processes that share host memory by exported handles, as refuseShared does.
func refuseHostMemory(procs cuda.Group, driver string) error {
	one, other, err := procs.SharedHostMemory()
	if err != nil || one == 0 {
		return err
	}
	return fmt.Errorf("processes %s and %s share host memory of the driver (cuMemCreate, an exported handle): driver %s would checkpoint them and never restore them; set NCCL_CUMEM_HOST_ENABLE=0 for NCCL, share files in /dev/shm elsewhere: %w",
		proc.Describe(one), proc.Describe(other), driver, errdefs.ErrFailedPrecondition)
}

// useOf asks how much GPU memory the processes have. The helper counts pids as the machine does.
func useOf(ctx context.Context, helper *cuda.Helper, procs cuda.Group) (usage, error) {
	survey, err := helper.Survey(ctx)
	if err != nil {
		return usage{}, err
	}
	ours := make(map[int]bool)
	for _, p := range procs {
		ours[p.PID.Host] = p.State != cuda.Checkpointed
	}
	u := usage{byGPU: make(map[string]uint64), byPID: make(map[int]uint64)}
	for _, d := range survey.Devices {
		for _, user := range d.Users {
			if ours[user.PID] {
				u.byGPU[d.UUID] += user.Bytes
				u.byPID[user.PID] += user.Bytes
			}
		}
	}
	return u, nil
}

// had returns the GPUs that the processes had open when they were locked, in CUDA's order.
func (l *locked) had() (had []cuda.GPU) {
	for _, d := range l.info.GPUs {
		if slices.ContainsFunc(l.procs, func(p cuda.Process) bool { return slices.Contains(p.GPUs, d.Minor) }) {
			had = append(had, d)
		}
	}
	return had
}

// seen returns the GPUs that the processes could open, used or not.
func (l *locked) seen(request cdi.Request) (seen []cuda.GPU) {
	had := gpulist.UUIDs(l.had())
	for _, d := range l.info.GPUs {
		if request.Grants(cdi.GPU{Minor: d.Minor}) || slices.Contains(had, d.UUID) {
			seen = append(seen, d)
		}
	}
	return seen
}

// memory returns the anonymous areas of each process.
func (l *locked) memory() ([][]cuda.Range, error) {
	all := make([][]cuda.Range, len(l.procs))
	for i, p := range l.procs {
		var err error
		if all[i], err = cuda.AnonymousRanges(p.PID.Host); err != nil {
			return nil, err
		}
	}
	return all, nil
}

// measure notes each process's bytes of GPU state: the memory that it has now and had not before, and what
// has gone another way.
func (l *locked) measure(before [][]cuda.Range) error {
	after, err := l.memory()
	if err != nil {
		return err
	}
	l.sizes = make([]uint64, len(l.procs))
	for i := range l.procs {
		for _, a := range cuda.NewRanges(before[i], after[i]) {
			l.sizes[i] += a.Bytes()
		}
	}
	for _, a := range l.areas {
		if a.filling != nil {
			l.sizes[a.Process] += a.Bytes
		}
	}
	return nil
}

// anySaved reports whether the driver still has one of the processes checkpointed after a step
// whose undoing may have failed, or whether that is not known: RestoreInPlace is tried then, and
// reports. The container is thawed.
func (l *locked) anySaved(ctx context.Context, by *cudahelper.Helpers) bool {
	helper, err := by.Get(ctx)
	if err != nil {
		return true
	}
	for _, p := range l.procs.Living() {
		if p.State == cuda.Checkpointed {
			continue // by hand, before
		}
		state, err := helper.State(ctx, p.PID.Host)
		if (err != nil || state == cuda.Checkpointed) && !errors.Is(err, cuda.ErrNotCUDA) {
			return true
		}
	}
	return false
}

// ErrLost reports that the driver has taken the GPU state of a process and will not give it back. The
// program cannot go on.
var ErrLost = errors.New("the driver has the program's GPU state and does not give it back, so the program is lost")

// judge adds ErrLost to the error of a restore to the GPUs that the processes had, if trying again is
// of no use. Driver 580 refuses a process that it cannot restore with InvalidValue or Unknown, and
// from then on with OperatingSystem (measured). It answers NotSupported too, and both also where a
// GPU cannot be reached for the moment. Too little memory, for one, may be another matter later.
func judge(err error, procs cuda.Group, stuck bool) error {
	refused := cuda.RestoreRefusal(err)
	if refused == nil || errors.Is(err, ErrLost) || !slices.Contains(procs.Living().Hosts(), refused.PID) {
		return err
	}
	switch refused.Result {
	case cuda.InvalidValue, cuda.Unknown:
	case cuda.NotSupported, cuda.OperatingSystem:
		if !stuck {
			return err
		}
	default:
		return err
	}
	return fmt.Errorf("%w: %w", ErrLost, err)
}

// putBack has the data path put the areas back, once: what is in a process afterwards is the
// driver's. If it fails for another process, it checkpoints this one again, to wherever it likes,
// and something else may lie where the area was. A process that is not checkpointed any more is
// lost: somebody has had the driver restore it by hand, from an area that was empty.
func (l *locked) putBack(ctx context.Context, helper *cuda.Helper, job *Job) (done func(context.Context), err error) {
	var areas []Area
	living := l.procs.Living()
	for _, a := range l.areas {
		pid := l.procs[a.Process].PID.Host
		if a.inProcess || !slices.ContainsFunc(living, func(p cuda.Process) bool { return p.PID.Host == pid }) {
			continue
		}
		state, err := helper.State(ctx, pid)
		if err != nil {
			return nil, err
		}
		if state != cuda.Checkpointed {
			return nil, fmt.Errorf("process %d is %v, though its GPU state is in a file: it was restored by hand from an empty area: %w",
				pid, state, ErrLost)
		}
		areas = append(areas, a)
	}
	if done, err = l.path.Restore(ctx, job, areas); err != nil {
		return nil, err
	}
	for i := range l.areas {
		l.areas[i].inProcess = true
	}
	return done, nil
}

// dropAreas forgets the areas, whose bytes are on the GPUs or, complete, in an image. What the driver has
// not had the processes read until they are unlocked.
func (l *locked) dropAreas() {
	for i := range l.areas {
		if a := &l.areas[i]; a.Interposer && a.held != nil {
			l.lent = append(l.lent, a.held)
			continue
		}
		l.areas[i].release()
	}
	l.areas = nil
}

// giveUp ends what was lent to processes, which are unlocked or have ended.
func (l *locked) giveUp() {
	for _, f := range l.lent {
		f.release()
	}
	l.lent = nil
}
