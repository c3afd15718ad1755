// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures checkpoints and restores: this project's shim beside
// its peers, in turns, in one call.
//
// A run's life: a workload is started and fills its GPU memory; it is
// checkpointed into a directory, and ended; it is restored from there and
// verified, bit by bit; it is removed. Both operations are timed on the
// client's clock. A run that is not verified counts for nothing. The runs of a
// case take turns between the methods, so that what else the machine does hits
// all of them.
//
// Switches add what is not such a run: checkpoint images, their way to a registry
// and back (--images), a disk with too little memory before it (--write-through),
// a container with too small a memory limit (--limit-case).
//
// It writes results.json (every run), results.md (tables), chart.svg (time
// against size), timeline.svg (the phases of a median run), arrival.svg (bytes
// over time of restores from a registry) and nodes.svg (time against nodes) into
// --out. The programs under test come from GPUCKPT_BIN; nothing else of this repository is
// needed. With file arguments it measures nothing, and draws those results
// files merged.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// errRuns says that runs of ours failed.
var errRuns = errors.New("runs failed")

// command is the command line.
type command struct {
	selection
	out, dir, diskDir      string
	rounds, peerRounds     int
	copyThreads            int
	budget                 int // seconds
	warmMemory             uint64
	diskProbe              uint64
	limitSize, limitMemory uint64
	limitCase, warmUp      bool
	writeThrough           bool
	throughSize, buffer    uint64
	images                 bool
	imagesSize             uint64 // 0 for one that suits the kind of GPU
	imageCases, imageMedia []string
	imageInMemory          string
	rates                  []uint64
	many, racks            int
	nodes                  []int
	nodeRates              nodeRates
	pcie                   float64
	pcieSource             string
	args, files            []string
}

func main() {
	cmd, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		os.Exit(0)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	if cmd.images && (slices.Contains(cmd.imageCases, caseWays) || slices.Contains(cmd.imageCases, caseNodes)) {
		// CNI keeps what it has done in that directory, wherever a network's own is.
		if err := harness.InOwnNetwork("/var/lib/cni"); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
	}
	os.Exit(harness.Interruptible(func(ctx context.Context) int {
		run := cmd.run
		if len(cmd.files) > 0 {
			run = cmd.draw
		}
		if err := run(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			return 1
		}
		return 0
	}))
}

// parse reads the command line.
func parse(args []string) (*command, error) {
	cmd := &command{args: args}
	set := flag.NewFlagSet("bench", flag.ContinueOnError)
	set.Usage = func() {
		fmt.Fprintf(set.Output(), "usage: bench [OPTIONS]           measure\n       bench --out DIR FILE...  draw results files, merged\n\n")
		set.PrintDefaults()
	}
	methods := set.String("methods", "ours,criugpu,stock", "what to compare; steered is ours without copy_threads, bycriu ours with CRIU moving the host memory, interposer ours with dev.gpuckpt.interposer, criugpu CRIU with its own plugin, stock runc's shim with CUDA steps by hand")
	sizes := set.String("sizes", "16MiB,64MiB,256MiB", "GPU memory of each process; a list, or none for no such cases")
	procs := set.String("procs", "1", "CUDA processes; a list")
	procsSizes := set.String("procs-sizes", "", "sizes for cases of more than one process; default --sizes")
	contents := set.String("content", report.ContentPattern, "what the memory holds: pattern (random), zero, weights (bf16); a list")
	media := set.String("media", report.OnTmpfs, "where images lie: tmpfs, disk; a list")
	modes := set.String("modes", report.ModeExit, "after the checkpoint: exit, leave (running); a list")
	warm := set.String("warm-memory", "0", "host memory to touch once before anything is timed")
	probe := set.String("disk-probe", "4GiB", "bytes to write to measure the disk's rate, with --media disk")
	limitSize := set.String("limit-size", "16GiB", "GPU memory of --limit-case")
	throughSize := set.String("through-size", "16GiB", "GPU memory of --write-through")
	buffer := set.String("through-buffer", "1GiB", "memory that --write-through may take for it")
	limitMemory := set.String("limit-memory", "2GiB", "memory limit of --limit-case; the software GPU gets its GPU memory on top")
	imagesSize := set.String("images-size", "", "GPU memory of --images; default 8GiB, with the software GPU 256MiB")
	imageCases := set.String("image-cases", "none,zstd,registry", "what --images measures: none, zstd: images of that compression; registry: to a registry and back; many: several restores of one image at once; ways: from the registry by gpuckpt, ctr and a pod beside each other, which needs Kubernetes' programs; nodes: nodes that restore one image at once from a registry, and by a pull-through registry a rack, which needs hack/setup imagetools and tc; a list")
	set.StringVar(&cmd.imageInMemory, "image-in-memory", "", "gpuckpt checkpoint's --in-memory for --images; 0 has dumps on the disk with --image-media disk")
	imageMedia := set.String("image-media", report.OnTmpfs, "where containerd is for --images: tmpfs, disk; a list")
	rates := set.String("arrival-rates", "100MB,1GB,0", "what the registry of --images sends a second; 0 is no limit; a list")
	set.IntVar(&cmd.many, "many", 4, "restores at once of --image-cases many")
	nodes := set.String("nodes", "1,2,4,8", "nodes of --image-cases nodes; a list")
	nodeRates := set.String("node-rates", "40MB,40MB,40MB", "what carries a second with --image-cases nodes: the registry, a rack's registry, a node's network")
	set.IntVar(&cmd.racks, "racks", 2, "racks of --image-cases nodes, at most one a node")
	set.IntVar(&cmd.gpus, "gpus", 0, "GPUs to deal processes out to, at most; 0 for all")
	set.BoolVar(&cmd.plain, "plain", false, "measure a container without CUDA too")
	shm := set.String("shm", "0", "measure a container without CUDA with so much in /dev/shm too; 0 for none")
	host := set.String("host-memory", "0", "measure a container without CUDA with so much host memory too; 0 for none")
	beside := set.String("host-memory-beside", "0", "measure each size again with so much host memory of the program beside it, and images with it; 0 for none")
	hostKinds := set.String("host-memory-kinds", report.HostKinds[0], "what --host-memory-beside is: pageable, pinned, registered, shared; a list")
	set.BoolVar(&cmd.limitCase, "limit-case", false, "checkpoint a container whose memory limit is below its GPU memory")
	set.BoolVar(&cmd.writeThrough, "write-through", false, "checkpoint to a disk with too little memory for the GPU state, beside the usual way")
	set.BoolVar(&cmd.images, "images", false, "make checkpoint images, also by ctr with the methods ours and stock, and send them to a registry and back")
	set.BoolVar(&cmd.warmUp, "warm-up", true, "one small run of each method first, which does not count")
	set.IntVar(&cmd.copyThreads, "copy-threads", -1, "the setting of that name for ours; below 0 for its default")
	set.IntVar(&cmd.rounds, "runs", 5, "runs of each method in each case")
	set.IntVar(&cmd.peerRounds, "peer-runs", 0, "runs of the methods other than ours; 0 for as many")
	set.IntVar(&cmd.budget, "budget", 3600, "seconds; no run is started that would end later")
	set.Float64Var(&cmd.pcie, "pcie-gbps", 55.4, "the chart's limit in GB/s, with a real GPU; 0 for none")
	set.StringVar(&cmd.pcieSource, "pcie-source", "55.4 GB/s pinned copy, measured 2026-11 on H200", "the limit's legend")
	set.StringVar(&cmd.out, "out", defaultOut(), "directory for the results")
	set.StringVar(&cmd.dir, "dir", os.Getenv("GPUCKPT_TEST_DIR"), "directory for containerd; default that of temporary files")
	set.StringVar(&cmd.diskDir, "disk-dir", os.TempDir(), "directory on the disk that --media disk is about")
	if err := set.Parse(args); err != nil {
		return nil, err
	}
	cmd.files = set.Args()
	var errs []error
	words := func(to *[]string, name, list string, known ...string) {
		var err error
		*to, err = oneOf(name, list, known...)
		errs = append(errs, err)
	}
	words(&cmd.methods, "methods", *methods, report.Ours, report.Steered, report.ByCRIU, report.Interposer, report.CRIUPlugin, report.Stock)
	words(&cmd.contents, "content", *contents, report.ContentPattern, report.ContentZero, report.ContentWeights)
	words(&cmd.media, "media", *media, report.OnTmpfs, report.OnDisk)
	words(&cmd.imageCases, "image-cases", *imageCases, caseNone, caseZstd, caseRegistry, caseMany, caseWays, caseNodes)
	words(&cmd.imageMedia, "image-media", *imageMedia, report.OnTmpfs, report.OnDisk)
	words(&cmd.hostKinds, "host-memory-kinds", *hostKinds, report.HostKinds...)
	words(&cmd.modes, "modes", *modes, report.ModeExit, report.ModeLeave)
	size := func(to *uint64, name, text string) {
		var err error
		if *to, err = parseSize(text); err != nil {
			errs = append(errs, fmt.Errorf("--%s: %w", name, err))
		}
	}
	size(&cmd.warmMemory, "warm-memory", *warm)
	size(&cmd.diskProbe, "disk-probe", *probe)
	size(&cmd.shm, "shm", *shm)
	size(&cmd.host, "host-memory", *host)
	size(&cmd.beside, "host-memory-beside", *beside)
	size(&cmd.limitSize, "limit-size", *limitSize)
	size(&cmd.limitMemory, "limit-memory", *limitMemory)
	size(&cmd.throughSize, "through-size", *throughSize)
	size(&cmd.buffer, "through-buffer", *buffer)
	if *imagesSize != "" {
		if size(&cmd.imagesSize, "images-size", *imagesSize); cmd.imagesSize == 0 {
			errs = append(errs, fmt.Errorf("--images-size: %q is nothing to measure", *imagesSize))
		}
	}
	var err error
	if *sizes != noSizes {
		cmd.sizes, err = parseSizes("sizes", *sizes)
		errs = append(errs, err)
	}
	if cmd.procsSizes = cmd.sizes; *procsSizes != "" {
		cmd.procsSizes, err = parseSizes("procs-sizes", *procsSizes)
		errs = append(errs, err)
	}
	cmd.selection.procs, err = parseCounts("procs", *procs)
	errs = append(errs, err)
	cmd.rates, err = parseRates(*rates)
	errs = append(errs, err)
	if cmd.many < 1 || cmd.racks < 1 {
		errs = append(errs, errors.New("--many and --racks are at least 1"))
	}
	cmd.nodes, err = parseCounts("nodes", *nodes)
	errs = append(errs, err)
	cmd.nodeRates, err = parseNodeRates(*nodeRates)
	errs = append(errs, err)
	if cmd.rounds < 1 || cmd.peerRounds < 0 {
		errs = append(errs, errors.New("--runs is at least 1"))
	}
	if cmd.peerRounds == 0 {
		cmd.peerRounds = cmd.rounds
	}
	return cmd, errors.Join(errs...)
}

// defaultOut is the directory that OUT names, else one of this program's.
func defaultOut() string {
	if dir := os.Getenv("OUT"); dir != "" {
		return dir
	}
	return "bench-results"
}

// draw merges results files and writes their tables and pictures.
func (cmd *command) draw(context.Context) error {
	r, err := report.Read(cmd.files)
	if err != nil {
		return err
	}
	return cmd.finish(r)
}

// finish writes the results and prints the tables.
func (cmd *command) finish(r *report.Results) error {
	if err := os.MkdirAll(cmd.out, 0o755); err != nil {
		return fmt.Errorf("write the results: %w", err)
	}
	err := r.Write(cmd.out)
	fmt.Printf("\n%s\nresults: %s\n", r.Markdown(), cmd.out)
	return err
}

// run measures.
func (cmd *command) run(ctx context.Context) (err error) {
	began := time.Now()
	logf := func(format string, args ...any) {
		fmt.Printf("%7.1f  %s\n", time.Since(began).Seconds(), fmt.Sprintf(format, args...))
	}
	bins, err := harness.FindBins()
	if err != nil {
		return err
	}
	gpu, err := harness.DetectGPU(bins)
	if err != nil {
		return err
	}
	memory, err := readMemory()
	if err != nil {
		return err
	}
	r := newResults(harness.NewResults(ctx, bins, gpu), cmd.args, runtime.NumCPU(), memory.total)
	if gpu.Kind == harness.RealGPU && cmd.pcie > 0 {
		r.PCIe, r.PCIeSource = cmd.pcie*1e9, cmd.pcieSource
	}
	logf("%d × %s, driver %s, %d CPUs, %s of memory", len(gpu.Devices), r.Model(), gpu.Driver, r.CPUs, report.FormatSize(memory.total))
	if cmd.gpus == 0 || cmd.gpus > len(gpu.Devices) {
		cmd.gpus = len(gpu.Devices)
	}
	if cmd.warmMemory > 0 {
		logf("touching %s of memory", report.FormatSize(cmd.warmMemory))
		if err := warmMemory(cmd.warmMemory); err != nil {
			return err
		}
	}
	if slices.Contains(cmd.methods, report.CRIUPlugin) {
		if err := adoptOrphans(); err != nil {
			return err
		}
	}
	b := &bench{rounds: cmd.rounds, peerRounds: cmd.peerRounds, end: began.Add(time.Duration(cmd.budget) * time.Second), logf: logf, dirs: map[string]string{}}
	if cmd.copyThreads >= 0 {
		b.settings = fmt.Sprintf("[debug]\ncopy_threads = %d\n", cmd.copyThreads)
	}
	tmpfs, unmount, err := mountTmpfs(os.TempDir())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unmount()) }()
	b.dirs[report.OnTmpfs] = tmpfs
	if b.dirs[report.OnDisk], err = os.MkdirTemp(cmd.diskDir, "gpuckpt-bench-disk"); err != nil {
		return fmt.Errorf("make a directory for images: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(b.dirs[report.OnDisk])) }()
	if (cmd.writeThrough || slices.Contains(cmd.media, report.OnDisk) || cmd.images && slices.Contains(cmd.imageMedia, report.OnDisk)) && inMemory(b.dirs[report.OnDisk]) {
		return fmt.Errorf("--disk-dir %s is in memory", cmd.diskDir)
	}
	if b.c, err = start(ctx, bins, gpu, cmd.dir, b.settings); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.c.Stop()) }()

	failed := cmd.measure(ctx, b, r)
	r.Runs = b.runs
	r.Calls[0].NotRun = b.notRun
	err = errors.Join(failed, cmd.finish(r))
	if failed := r.FirstFailed(); failed != "" {
		err = errors.Join(err, fmt.Errorf("%w: %s", errRuns, failed))
	}
	return err
}

// shimConfig is the shim's configuration, with a cgroup of that name for GPU
// state, and further settings, those of [staging] first.
func shimConfig(c *harness.Containerd, cgroup, settings string) string {
	return fmt.Sprintf("log_dir = %q\nstate_dir = %q\n[signing]\nkey = %q\n[staging]\ncgroup = %q\n%s[criu.options]\nnetwork-lock = \"skip\"\n",
		filepath.Join(c.Dir(), "criu"), c.Records(), c.SigningKey(), c.Namespace()+"/"+cgroup, settings)
}

// start starts a containerd for containers of the workload, in a directory of its
// own in dir, with these settings for the shim.
func start(ctx context.Context, bins harness.Bins, gpu harness.GPU, dir, settings string) (*harness.Containerd, error) {
	c, err := harness.Start(ctx, harness.Options{Bins: bins, GPU: gpu, Dir: dir})
	if err != nil {
		return nil, err
	}
	// What a shim leaves on a machine by default goes with the instance. CRIU
	// locks no network for any of the methods.
	if err := errors.Join(c.SetShimConfig(shimConfig(c, "staging", settings)), c.ImportWorkload(ctx)); err != nil {
		return nil, errors.Join(err, c.Stop())
	}
	return c, nil
}

// measure makes all the measurements; the runs are in b.
func (cmd *command) measure(ctx context.Context, b *bench, r *report.Results) error {
	plan := cmd.plan()
	if slices.ContainsFunc(plan, func(p planned) bool { return p.Media == report.OnDisk }) || cmd.images && slices.Contains(cmd.imageMedia, report.OnDisk) {
		write, read, err := diskRates(b.dirs[report.OnDisk], cmd.diskProbe)
		if err != nil {
			return err
		}
		b.logf("the disk takes %.2f GB/s and gives %.2f GB/s", write/1e9, read/1e9)
		r.Calls[0].DiskRate, r.Calls[0].DiskReadRate = write, read
	}
	if cmd.warmUp {
		for _, method := range cmd.methods {
			s := report.Shape{Content: report.ContentPattern, Size: 16 << 20, Procs: 1, GPUs: 1, Media: report.OnTmpfs, Mode: report.ModeExit}
			if m := b.once(ctx, s, method, 0, 0); m.Error != "" {
				b.logf("the warm-up of %s FAILED: %s", method, m.Error)
			} else {
				b.logf("warmed up %s: %.1f s", method, m.Whole)
			}
		}
	}
	b.measure(ctx, plan)
	if cmd.writeThrough {
		var err error
		if r.Short, err = b.shortCase(ctx, cmd.throughSize, cmd.buffer); err != nil {
			return err
		}
	}
	if cmd.images {
		if err := cmd.measureImages(ctx, b, r); err != nil {
			return err
		}
	}
	if !cmd.limitCase {
		return nil
	}
	if ctx.Err() != nil || time.Now().After(b.end) {
		b.notRun = append(b.notRun, "the memory limit: the time is over")
		return nil
	}
	var err error
	r.Limit, err = b.limitCase(ctx, cmd.limitSize, cmd.limitMemory)
	return err
}

// measureImages measures checkpoint images, in a containerd for each of the media that has all of
// its directories there.
func (cmd *command) measureImages(ctx context.Context, b *bench, r *report.Results) error {
	size := cmd.imagesSize
	if size == 0 {
		if size = 256 << 20; b.c.GPU().Kind == harness.RealGPU {
			size = 8 << 30
		}
	}
	for _, media := range cmd.imageMedia {
		if err := cmd.measureImagesOn(ctx, b, r, size, media); err != nil {
			return err
		}
	}
	if slices.Contains(cmd.imageCases, caseNodes) {
		if err := cmd.measureNodes(ctx, b, r, size); err != nil {
			return err
		}
	}
	if !slices.Contains(cmd.imageCases, caseWays) {
		return nil
	}
	return cmd.measureWays(ctx, b, r, size)
}

func (cmd *command) measureImagesOn(ctx context.Context, b *bench, r *report.Results, size uint64, media string) (err error) {
	c, err := start(ctx, b.c.Bins(), b.c.GPU(), b.dirs[media], b.settings)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Stop()) }()
	i, err := newImageCase(b, c, size, media)
	if err != nil {
		return err
	}
	i.cases, i.rates, i.many = cmd.imageCases, cmd.rates, cmd.many
	i.gpus, i.host = cmd.gpus, cmd.beside
	i.inMemory = cmd.imageInMemory
	i.measure(ctx, cmd.methods)
	r.ImageRuns, r.RegistryRuns, r.ManyRuns = append(r.ImageRuns, i.runs...), append(r.RegistryRuns, i.transfers...), append(r.ManyRuns, i.manyRuns...)
	return nil
}
