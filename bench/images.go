// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/core/content"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// What --images measures of ours.
const (
	caseNone     = "none"
	caseZstd     = "zstd"
	caseRegistry = "registry"
	caseMany     = "many"
	caseWays     = "ways"  // of a node of its own: measureWays
	caseNodes    = "nodes" // of nodes of its own: measureNodes
)

// imageCase measures checkpoint images in a containerd whose store, snapshots
// and dumps are on the tmpfs for images, or on the disk.
type imageCase struct {
	b          *bench
	c          *harness.Containerd
	size, host uint64
	media      string
	// inMemory is checkpoint's flag of that name; "" for its default.
	inMemory string
	// cases are what is measured of ours, rates those of the registry, many and gpus how many restores
	// begin at once, and on how many GPUs.
	cases      []string
	rates      []uint64
	many, gpus int
	// cdi is the directory of a CDI specification of the GPUs.
	cdi string
	// ids are the containers of the run that is being made.
	ids []string

	runs      []report.ImageRun
	transfers []report.RegistryRun
	manyRuns  []report.ManyRun
}

// imageTurn is what is measured once in each round.
type imageTurn struct {
	name   string
	rounds int
	// expected is how long it will take: a guess, then, once known, the longest
	// so far.
	expected time.Duration
	known    bool
	do       func(ctx context.Context, o report.ImageOutcome) report.ImageOutcome
	failed   int
	ended    bool
}

// newImageCase prepares a containerd for it.
func newImageCase(b *bench, c *harness.Containerd, size uint64, media string) (*imageCase, error) {
	i := &imageCase{b: b, c: c, size: size, media: media, cdi: filepath.Join(c.Dir(), "cdi")}
	return i, c.WriteCDISpec(i.cdi)
}

// turns are what is measured with the methods, in their order.
func (i *imageCase) turns(methods []string) []imageTurn {
	gib := float64(i.size) / (1 << 30)
	guess := func(perGiB float64) time.Duration { return time.Duration((3 + perGiB*gib) * float64(time.Second)) }
	way := func(method, compression string, do func(context.Context, *report.ImageRun) error) func(context.Context, report.ImageOutcome) report.ImageOutcome {
		return func(ctx context.Context, o report.ImageOutcome) report.ImageOutcome {
			r := report.ImageRun{ImageOutcome: o, Method: method, Compression: compression}
			i.once(ctx, &r.ImageOutcome, func(ctx context.Context) error { return do(ctx, &r) })
			if r.Verified {
				i.b.logf("%s: checkpoint %s, restore %s, resume %s, verified", r.Name(), report.Seconds(r.Checkpoint), report.Seconds(r.Restore), report.Seconds(r.Resume))
			}
			if ctx.Err() == nil { // else it was broken off
				i.runs = append(i.runs, r)
			}
			return r.ImageOutcome
		}
	}
	var all []imageTurn
	for _, method := range methods {
		switch method {
		case report.Ours:
			for _, name := range i.cases {
				t := imageTurn{rounds: i.b.rounds}
				switch name {
				case caseWays, caseNodes:
					continue
				case caseRegistry:
					t.name, t.expected, t.do = "a registry", guess(6), i.transfer
				case caseMany:
					t.name, t.expected, t.do = fmt.Sprintf("%d at once", i.many), guess(3), i.manyAtOnce
				default:
					t.name, t.expected, t.do = report.ImageWay(report.Ours, name), guess(1.5), way(report.Ours, name, i.ours)
				}
				all = append(all, t)
			}
		case report.Stock:
			all = append(all, imageTurn{name: report.ImageWay(report.Stock, ""), rounds: i.b.peerRounds, expected: guess(4), do: way(report.Stock, "", i.stock)})
		}
	}
	return all
}

// measure takes the turns, round by round. It ends early when the time is over,
// or ctx is; what is missing is in b.notRun.
func (i *imageCase) measure(ctx context.Context, methods []string) {
	turns := i.turns(methods)
	for round := range max(i.b.rounds, i.b.peerRounds) {
		for n := range turns {
			t := &turns[n]
			if t.ended || round >= t.rounds || t.failed >= giveUpAfter {
				continue
			}
			why := i.refusal(ctx, t.expected)
			if why == "" {
				o := report.ImageOutcome{Size: i.size, Host: i.host, Round: round + 1}
				if i.media != report.OnTmpfs {
					o.Media = i.media
				}
				o = t.do(ctx, o)
				if took := time.Duration(o.Whole * float64(time.Second)); o.Error == "" {
					if !t.known || took > t.expected {
						t.expected, t.known = took, true
					}
					continue
				}
				if ctx.Err() == nil {
					t.failed++
					i.b.logf("checkpoint image of %s, %s: FAILED: %s", report.FormatSize(i.size), t.name, o.Error)
					continue
				}
				why = interrupted
			}
			t.ended = true
			i.b.notRun = append(i.b.notRun, fmt.Sprintf("checkpoint image of %s, %s, from round %d of %d on: %s", report.FormatSize(i.size), t.name, round+1, t.rounds, why))
		}
	}
}

// imageCopies is how many copies of the GPU memory are in the machine's at most:
// a program's own, a dump, ctr's two archives of it, and one more on a software
// GPU.
const imageCopies = 5

// refusal says why a run is not to be made; empty when it is.
func (i *imageCase) refusal(ctx context.Context, expected time.Duration) string {
	if ctx.Err() != nil {
		return interrupted
	}
	if why := i.b.unfit(i.shape(), report.Ours); why != "" {
		return why
	}
	memory, err := readMemory()
	if err != nil {
		return err.Error()
	}
	if need := imageCopies*(i.size+i.host) + spare; i.size > spare/4 && need > memory.available {
		return fmt.Sprintf("it needs %s of memory, %s are available", report.FormatSize(need), report.FormatSize(memory.available))
	}
	if time.Until(i.b.end) < expected {
		return fmt.Sprintf("the time is over (one takes some %.0f s)", expected.Seconds())
	}
	return ""
}

func (i *imageCase) shape() report.Shape {
	return report.Shape{Content: report.ContentPattern, Size: i.size, Host: i.host, Procs: 1, GPUs: 1, Media: i.media, Mode: report.ModeExit}
}

// once makes a run. Nothing of it stays in containerd.
func (i *imageCase) once(ctx context.Context, o *report.ImageOutcome, do func(context.Context) error) {
	began := time.Now()
	limit := runLimit + imageCopies*time.Duration((i.size+i.host)/slowRate)*time.Second
	inTime, cancel := context.WithTimeout(ctx, limit)
	err := do(inTime)
	cancel()
	if err != nil {
		err = fmt.Errorf("%w\nthe end of containerd's log:\n%s", err, i.c.LogTail(2000))
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), runLimit)
	defer cancel()
	for _, id := range i.ids {
		err = errors.Join(err, i.c.Remove(clean, id))
	}
	i.ids = nil
	if err = errors.Join(err, i.c.ForgetImages(clean)); err != nil {
		o.Error = err.Error()
	}
	o.Verified = err == nil
	o.Whole = time.Since(began).Seconds()
}

// id names a container of the run.
func (i *imageCase) id() string {
	i.b.serial++
	id := fmt.Sprintf("image-%d", i.b.serial)
	i.ids = append(i.ids, id)
	return id
}

// start runs the workload that is going to be checkpointed.
func (i *imageCase) start(ctx context.Context, method string) (*containerSubject, error) {
	w, err := newWorkload(i.shape())
	if err != nil {
		return nil, err
	}
	s, err := startContainer(ctx, i.c, method, i.id(), "", w, 0)
	if err != nil {
		return nil, err
	}
	return s, i.counts(ctx, s.k, "101")
}

// counts checks all of a program's GPU memory, and that it goes on counting
// where it was.
func (i *imageCase) counts(ctx context.Context, k *harness.Container, want string) error {
	if err := answers(ctx, k, "verify", "bad=0"); err != nil {
		return err
	}
	return answers(ctx, k, "count", want)
}

// answers asks a program.
func answers(ctx context.Context, k *harness.Container, question, want string) error {
	answer, err := k.Ask(ctx, question)
	if err != nil {
		return err
	}
	if answer != want {
		return fmt.Errorf("%s answers %q to %q, it should be %q", k.ID, answer, question, want)
	}
	return nil
}

// timed gives how many seconds something takes.
func timed(do func() error) (float64, error) {
	began := time.Now()
	err := do()
	return time.Since(began).Seconds(), err
}

// ours makes an image with gpuckpt, and resumes it twice: with gpuckpt, which
// unpacks it, and with ctr, as on a node that has unpacked what it pulled.
func (i *imageCase) ours(ctx context.Context, r *report.ImageRun) error {
	s, err := i.start(ctx, report.Ours)
	if err != nil {
		return err
	}
	before, err := i.stored(ctx)
	if err != nil {
		return err
	}
	ref := "gpuckpt.test/bench:" + r.Compression
	args := []string{"checkpoint", s.k.ID, "--image", ref, "--compression", r.Compression}
	if i.inMemory != "" {
		args = append(args, "--in-memory", i.inMemory)
	}
	var made harness.CheckpointAnswer
	r.Checkpoint, err = timed(func() error { return i.c.Gpuckpt(ctx, &made, args...) })
	if err != nil {
		return err
	}
	r.Dump, r.Build = made.DumpSeconds, made.BuildSeconds
	after, err := i.stored(ctx)
	if err != nil {
		return err
	}
	r.Stored = above(after, before)
	if err := s.remove(ctx); err != nil {
		return err
	}
	if r.Flush, err = i.cold(); err != nil {
		return err
	}
	id := i.id()
	r.Restore, err = timed(func() error {
		return i.c.Gpuckpt(ctx, &struct{}{}, "restore", ref, "--name", id, "--net-host", "--gpus", "0", "--cdi-spec-dirs", i.cdi, "--snapshotter", i.c.Snapshotter())
	})
	if err != nil {
		return err
	}
	restored := i.c.Adopt(id, s.workload.port)
	if err := i.counts(ctx, restored, "102"); err != nil {
		return fmt.Errorf("after the restore: %w", err)
	}
	if err := restored.Remove(ctx); err != nil {
		return err
	}
	if _, err := i.cold(); err != nil {
		return err
	}
	r.Resume, err = i.resume(ctx, ref, s.workload.port)
	return err
}

// cold has all of containerd's files on the disk and none in memory, on a disk, and returns how long
// the first took, in seconds.
func (i *imageCase) cold() (float64, error) {
	if i.media != report.OnDisk {
		return 0, nil
	}
	took, err := syncDir(filepath.Join(i.c.Dir(), "root"))
	return took.Seconds(), err
}

// resume starts a container of a checkpoint image with ctr, and gives how long
// that took. The container counts on from 101.
func (i *imageCase) resume(ctx context.Context, ref string, port int) (took float64, err error) {
	spec := harness.RunSpec{
		ID: i.id(), Image: ref, GPUs: []int{0}, Port: port, Args: []string{"gpuwork"},
		Annotations: map[string]string{annotations.Restore: "true"},
	}
	var k *harness.Container
	took, err = timed(func() (err error) {
		k, err = i.c.Run(ctx, spec)
		return err
	})
	if err == nil {
		err = i.counts(ctx, k, "102")
	}
	if err != nil {
		return 0, fmt.Errorf("resume with ctr: %w", err)
	}
	return took, nil
}

// stock makes an image with ctr and runc's shim, and restores it, with the CUDA
// steps by hand before and after.
func (i *imageCase) stock(ctx context.Context, r *report.ImageRun) error {
	s, err := i.start(ctx, report.Stock)
	if err != nil {
		return err
	}
	before, err := i.stored(ctx)
	if err != nil {
		return err
	}
	const ref = "gpuckpt.test/bench:stock"
	r.Checkpoint, err = timed(func() error {
		if err := s.cudaSteps(ctx, "lock", "checkpoint"); err != nil {
			return err
		}
		return s.k.Checkpoint(ctx, ref)
	})
	if err != nil {
		return err
	}
	after, err := i.stored(ctx)
	if err != nil {
		return err
	}
	r.Stored = above(after, before)
	if err := s.remove(ctx); err != nil {
		return err
	}
	r.Restore, err = timed(func() (err error) {
		if s.k, err = i.c.Restore(ctx, s.k.ID, ref, s.workload.port); err != nil {
			return err
		}
		return s.cudaSteps(ctx, "restore", "unlock")
	})
	if err != nil {
		return err
	}
	if err := i.counts(ctx, s.k, "102"); err != nil {
		return fmt.Errorf("after the restore: %w", err)
	}
	return nil
}

// cudaSteps takes CUDA steps by hand.
func (s *containerSubject) cudaSteps(ctx context.Context, steps ...string) error {
	pid, err := s.k.Pid(ctx)
	if err != nil {
		return err
	}
	return s.cuda(ctx, startWatch(), pid, steps...)
}

// stored is what containerd's content store holds, in bytes.
func (i *imageCase) stored(ctx context.Context) (bytes uint64, err error) {
	err = i.c.Client().ContentStore().Walk(ctx, func(info content.Info) error {
		bytes += uint64(info.Size)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("measure the content store: %w", err)
	}
	return bytes, nil
}
