// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

const (
	// runLimit bounds one run beyond its share of data, which goes at slowRate
	// or faster.
	runLimit = 2 * time.Minute
	slowRate = 200 << 20 // bytes a second
	// giveUpAfter is how often a method may fail in a case.
	giveUpAfter = 2
)

// bench runs the measurements.
type bench struct {
	c *harness.Containerd
	// dirs are where images lie, by media.
	dirs map[string]string
	// rounds are how often each method is run in a case, peerRounds the peers.
	rounds, peerRounds int
	// end is when no new run is to be under way.
	end  time.Time
	logf func(format string, args ...any)

	runs   []report.Run
	notRun []string
	serial int
	// settings are those of [staging] for ours.
	settings string
	// staging is the cgroup whose peak is measured; empty for none.
	staging cgroupDir
}

// measure takes the cases one after the other, and in each the methods in
// turns. It ends early when the time is over or ctx is; the runs made are in
// b.runs, and b.notRun says what is missing.
func (b *bench) measure(ctx context.Context, plan []planned) {
	for _, p := range plan {
		failed, left := map[string]int{}, map[string]string{}
		for round := range max(b.rounds, b.peerRounds) {
			for _, method := range p.methods {
				rounds := b.rounds
				if method != report.Ours {
					rounds = b.peerRounds
				}
				if round >= rounds || failed[method] >= giveUpAfter || left[method] != "" {
					continue
				}
				label := fmt.Sprintf("%s, %s, round %d", p.Shape, method, round+1)
				why := b.refusal(ctx, p.Shape, method)
				var r report.Run
				if why == "" {
					r = b.once(ctx, p.Shape, method, round, 0)
					if r.Error != "" && ctx.Err() != nil {
						why = interrupted
					}
				}
				if why != "" {
					// No later round will do better.
					left[method] = fmt.Sprintf("%s, %s, from round %d of %d on: %s", p.Shape, method, round+1, rounds, why)
					b.notRun = append(b.notRun, left[method])
					continue
				}
				if r.Error != "" {
					failed[method]++
					b.logf("%s: FAILED: %s", label, r.Error)
				} else {
					b.logf("%s: checkpoint %s, restore %s, verified (%.1f s in all)", label, report.Seconds(r.Checkpoint.Seconds), report.Seconds(r.Restore.Seconds), r.Whole)
				}
				b.runs = append(b.runs, r)
			}
		}
	}
}

// interrupted is why nothing was run after a Ctrl-C.
const interrupted = "interrupted"

// refusal says why a run is not to be made; empty when it is.
func (b *bench) refusal(ctx context.Context, s report.Shape, method string) string {
	if ctx.Err() != nil {
		return interrupted
	}
	if why := b.unfit(s, method); why != "" {
		return why
	}
	if need := b.expected(s, method); time.Until(b.end) < need {
		return fmt.Sprintf("the time is over (one takes some %.0f s)", need.Seconds())
	}
	return ""
}

// spare is host memory that is left to everything else, in bytes: the driver
// alone takes some 550 MB for a bare context.
const spare = 2 << 30

// unfit says why the machine is too small for a case; empty when it is not.
func (b *bench) unfit(s report.Shape, method string) string {
	gpus := b.c.GPU().Devices
	onOne := s.Size * uint64((s.Procs+max(1, s.GPUs)-1)/max(1, s.GPUs))
	if s.Content != report.ContentNone && onOne > gpus[0].Memory-gpus[0].Memory/32 {
		return fmt.Sprintf("it needs %s on a GPU of %s", report.FormatSize(onOne), report.FormatSize(gpus[0].Memory))
	}
	// The state is in host memory once. The peers have it there as the
	// processes' memory; what they write to a tmpfs comes on top.
	need := s.Bytes() + s.Host
	if !isOurs(method) && s.Media == report.OnTmpfs {
		need *= 2
	} else if s.Media == report.OnTmpfs {
		need += s.Host
	}
	memory, err := readMemory()
	if err != nil {
		return err.Error()
	}
	if need > spare/4 && need+spare > memory.available {
		return fmt.Sprintf("it needs %s of memory, %s are available", report.FormatSize(need+spare), report.FormatSize(memory.available))
	}
	var st unix.Statfs_t
	if err := unix.Statfs(b.dirs[s.Media], &st); err != nil {
		return fmt.Sprintf("look at the space for images: %v", err)
	}
	if room, bytes := st.Bavail*uint64(st.Bsize), s.Bytes()+s.Host; bytes+bytes/16 > room {
		return fmt.Sprintf("its images need %s on the %s, which has %s", report.FormatSize(bytes), s.Media, report.FormatSize(room))
	}
	return ""
}

// expected is how long a run will take, judged by the method's slowest so far
// at this size or a smaller one, of at least a GiB where this one has that; where
// there was none, by what an H200 did.
func (b *bench) expected(s report.Shape, method string) time.Duration {
	const base, oursPerGiB, peerPerGiB = 2, 0.75, 2 // seconds
	guess := oursPerGiB
	if !isOurs(method) {
		guess = peerPerGiB
	}
	worst, known := base+(guess*float64(s.Bytes())+peerPerGiB*float64(s.Host))/(1<<30), false
	for _, r := range b.runs {
		if r.Method != method || r.Error != "" || r.Content == report.ContentNone || r.Host != s.Host {
			continue
		}
		scale := max(1, float64(s.Bytes())/float64(r.Bytes()))
		// What a small run takes is no matter of its size.
		if r.Bytes() > s.Bytes() || r.Bytes() < 1<<30 && s.Bytes() >= 1<<30 {
			continue
		}
		if !known {
			worst, known = base, true
		}
		worst = max(worst, r.Whole*scale)
	}
	return time.Duration(worst * float64(time.Second))
}

// once makes one run; memoryLimit is that of its container, in bytes, 0 for
// none. Nothing of it stays but what it answers.
func (b *bench) once(ctx context.Context, s report.Shape, method string, round int, memoryLimit uint64) (r report.Run) {
	began := time.Now()
	r = report.Run{Shape: s, Method: method, Round: round + 1}
	ctx, cancel := context.WithTimeout(ctx, runLimit+time.Duration((s.Bytes()+s.Host)/slowRate)*time.Second)
	defer cancel()
	var err error
	switch method {
	case report.Steered:
		err = b.configured("[debug]\ncopy_threads = 0\n", func() error { return b.fill(ctx, &r, memoryLimit) })
	case report.ByCRIU:
		err = b.configured("[debug]\nhost_memory = 0\n", func() error { return b.fill(ctx, &r, memoryLimit) })
	default:
		err = b.fill(ctx, &r, memoryLimit)
	}
	if err != nil {
		r.Error = err.Error()
	}
	r.Whole = time.Since(began).Seconds()
	return r
}

// configured does something while the shim has other settings.
func (b *bench) configured(settings string, do func() error) error {
	if err := b.c.SetShimConfig(shimConfig(b.c, "staging", settings)); err != nil {
		return err
	}
	return errors.Join(do(), b.c.SetShimConfig(shimConfig(b.c, "staging", b.settings)))
}

// start runs a workload under a method.
func (b *bench) start(ctx context.Context, method, images string, w workload, memoryLimit uint64) (subject, error) {
	b.serial++
	if method == report.CRIUPlugin {
		return startHost(b.c, images, w)
	}
	return startContainer(ctx, b.c, method, fmt.Sprintf("%s-%d", method, b.serial), images, w, memoryLimit)
}

// fill measures a run.
func (b *bench) fill(ctx context.Context, r *report.Run, memoryLimit uint64) (err error) {
	w, err := newWorkload(r.Shape)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp(b.dirs[r.Media], "images")
	if err != nil {
		return fmt.Errorf("make a directory for the images: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	s, err := b.start(ctx, r.Method, dir, w, memoryLimit)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, s.logs())
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), runLimit)
		defer cancel()
		err = errors.Join(err, s.remove(ctx))
	}()

	leave := r.Mode == report.ModeLeave
	if err := w.verify(ctx, 101); err != nil { // which also waits until it is ready
		return fmt.Errorf("before the checkpoint: %w", err)
	}
	shm, err := fillShm(ctx, s, w.Shm)
	if err != nil {
		return err
	}
	var ping *pinger
	if leave && w.Content != report.ContentNone {
		ping = startPinger(ctx, w.port)
	}
	r.Checkpoint, err = measured(func() (report.Operation, error) { return s.checkpoint(ctx, leave) })
	if ping != nil {
		gap, perr := ping.stop()
		r.Checkpoint.Gap = gap.Seconds()
		err = errors.Join(err, perr)
	}
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	r.Checkpoint.StagingPeak = b.staging.peak()
	if leave {
		if err := w.verify(ctx, 102); err != nil {
			return fmt.Errorf("after the checkpoint: %w", err)
		}
	}
	if err := s.end(ctx); err != nil {
		return fmt.Errorf("end after the checkpoint: %w", err)
	}
	if r.ImageBytes, err = imageBytes(dir); err != nil {
		return fmt.Errorf("measure the images: %w", err)
	}
	if r.Media == report.OnDisk {
		flush, err := syncDir(dir)
		if err != nil {
			return err
		}
		r.Flush = flush.Seconds()
	}
	if r.Restore, err = measured(func() (report.Operation, error) { return s.restore(ctx) }); err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	if err := w.verify(ctx, 102); err != nil {
		return fmt.Errorf("after the restore: %w", err)
	}
	if err := shm.verify(ctx); err != nil {
		return fmt.Errorf("after the restore: %w", err)
	}
	r.Verified = true
	return nil
}

// measured watches the machine's memory during an operation.
func measured(do func() (report.Operation, error)) (report.Operation, error) {
	runtime.GC() // this program's own is not to be measured
	sampler, err := startSampler()
	if err != nil {
		return report.Operation{}, err
	}
	op, err := do()
	peak, serr := sampler.stop()
	op.Memory = peak
	return op, errors.Join(err, serr)
}

// mountTmpfs mounts a tmpfs with huge pages on a new directory in parent; the
// function that it gives takes it away.
func mountTmpfs(parent string) (dir string, remove func() error, err error) {
	dir, err = os.MkdirTemp(parent, "gpuckpt-bench-tmpfs")
	if err != nil {
		return "", nil, fmt.Errorf("make a directory for the tmpfs: %w", err)
	}
	// Without a size it holds no more than half of the memory. The option huge
	// is refused by kernels built without it.
	for _, data := range []string{"huge=advise,size=95%", "size=95%"} {
		if err = unix.Mount("gpuckpt-bench", dir, "tmpfs", 0, data); err == nil {
			return dir, func() error {
				return errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir))
			}, nil
		}
	}
	return "", nil, errors.Join(fmt.Errorf("mount a tmpfs on %s: %w", filepath.Clean(dir), err), os.Remove(dir))
}
