// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command demo shows the main job in one run: a container counts packets in
// device memory, an unmodified ctr checkpoints it, the container is killed and
// removed, ctr restores it from the checkpoint, and it counts on.
//
// It runs a containerd of its own, which it stops at the end, also on Ctrl-C,
// and uses a real GPU where there is one, else the software GPU. It ends with
// status 0 only if the counter went on where the checkpoint was taken.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/defaults"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

const (
	image = "gpuckpt.test/counter:checkpoint"
	// The counter starts at 100, as in NVIDIA's demonstration of
	// cuda-checkpoint, and each packet adds one.
	wantBefore, wantAfter = "101", "102"
)

// errLeft says that something the demo started could not be ended or removed.
var errLeft = errors.New("clean up")

func main() {
	keep := flag.Bool("keep", false, "leave containerd and the restored container running until Ctrl-C")
	flag.Parse()
	os.Exit(harness.Interruptible(func(ctx context.Context) int {
		before, after, err := run(ctx, *keep)
		switch {
		case ctx.Err() != nil && !errors.Is(err, errLeft):
			// What failed failed because of the interruption.
			fmt.Println("\ninterrupted; all that was started has been stopped")
			return 130
		case err != nil:
			fmt.Fprintln(os.Stderr, "demo:", err)
			return 1
		}
		fmt.Printf("\ncounter before: %s, after restore: %s\n", before, after)
		if before != wantBefore || after != wantAfter {
			fmt.Fprintf(os.Stderr, "demo: these should be %s and %s\n", wantBefore, wantAfter)
			return 1
		}
		return 0
	}))
}

// run does everything and gives the counter's two answers. When it returns,
// nothing that it started runs any more. With keep it waits for Ctrl-C before it ends anything.
func run(ctx context.Context, keep bool) (before, after string, err error) {
	bins, err := harness.FindBins()
	if err != nil {
		return "", "", fmt.Errorf("%w; run `make demo`", err)
	}
	gpu, err := harness.DetectGPU(bins)
	if err != nil {
		return "", "", err
	}
	fmt.Print(describe(gpu))
	c, err := harness.Start(ctx, harness.Options{Bins: bins, GPU: gpu, Logf: logf})
	if err != nil {
		return "", "", err
	}
	// No other container on the machine has this name: removeFIFOs relies on it.
	name := fmt.Sprintf("counter-%d", os.Getpid())
	defer func() {
		if left := errors.Join(c.Stop(), removeFIFOs(name)); left != nil {
			err = errors.Join(err, fmt.Errorf("%w: %w", errLeft, left))
		}
	}()
	if err := c.ConfigureShim(""); err != nil {
		return "", "", err
	}
	if err := c.ImportWorkload(ctx); err != nil {
		return "", "", err
	}
	fmt.Printf("\n$ export CONTAINERD_ADDRESS=%s\n$ export CONTAINERD_NAMESPACE=%s\n", c.Address(), c.Namespace())

	title("A container that counts UDP packets, in a variable in GPU memory: 100")
	port, err := harness.FreePort()
	if err != nil {
		return "", "", err
	}
	k, err := c.Create(ctx, harness.RunSpec{
		ID: name, GPUs: []int{0}, Port: port,
		Args: []string{"gpuwork", "counter", "--port", strconv.Itoa(port)},
	})
	if err != nil {
		return "", "", err
	}
	fmt.Println("  GPU 0's device nodes and the driver's libraries go into its spec here, as\n  NVIDIA's container toolkit would put them there")
	if err := k.Start(ctx); err != nil {
		return "", "", err
	}
	if before, err = count(ctx, k); err != nil {
		return "", "", err
	}

	title("Checkpoint it, as an image")
	if err := timed(c, name, func() error { return k.Checkpoint(ctx, image) }); err != nil {
		return "", "", err
	}

	title("Kill and remove it")
	if err := k.Remove(ctx); err != nil {
		return "", "", err
	}

	title("Restore it from the image")
	if err := timed(c, name, func() error {
		k, err = c.Restore(ctx, name, image, port)
		return err
	}); err != nil {
		return "", "", err
	}
	if after, err = count(ctx, k); err != nil || !keep {
		return before, after, err
	}
	specs := filepath.Join(filepath.Dir(c.ShimConfigPath()), "cdi")
	if err := c.WriteCDISpec(specs); err != nil {
		return "", "", err
	}
	title("It is yours until Ctrl-C. In another terminal, as root:")
	own := strings.TrimSuffix(bins.SearchPath(), ":"+os.Getenv("PATH"))
	fmt.Printf(keepText, own, c.Address(), c.Namespace(), c.ShimConfigPath(), strings.Join(c.HostEnv(), " "), name, c.Dumps(), specs, port)
	<-ctx.Done()
	return before, after, nil
}

// keepText is what somebody can type.
const keepText = `
export PATH=%[1]s:$PATH CONTAINERD_ADDRESS=%[2]s CONTAINERD_NAMESPACE=%[3]s GPUCKPT_CONFIG=%[4]s %[5]s
gpuckpt ps
gpuckpt suspend %[6]s
gpuckpt resume %[6]s
gpuckpt checkpoint %[6]s --image gpuckpt.test/mine:1 --image-path %[7]s
gpuckpt ls
ctr containers delete %[6]s
gpuckpt restore gpuckpt.test/mine:1 --name again --net-host --gpus 0 --cdi-spec-dirs %[8]s
bash -c 'exec 3<>/dev/udp/127.0.0.1/%[9]d; echo >&3; timeout 5 head -c 3 <&3'    # 103
`

// removeFIFOs removes the output of a restored container. ctr makes it below
// containerd's own directory before the container has it, and leaves it there
// when it is interrupted in between.
func removeFIFOs(name string) error {
	fifos, err := filepath.Glob(filepath.Join(defaults.DefaultFIFODir, "*", name+"-std*"))
	if err != nil {
		return err
	}
	for _, fifo := range fifos {
		if err := os.RemoveAll(filepath.Dir(fifo)); err != nil {
			return err
		}
	}
	return nil
}

// describe says which GPU the demo runs on.
func describe(gpu harness.GPU) string {
	if gpu.Kind == harness.SoftwareGPU {
		why := "This machine has no NVIDIA GPU"
		if os.Getenv(harness.EnvGPU) != "" {
			why = harness.EnvGPU + " asks for it"
		}
		return why + ": the software GPU is used, a test double\nof the driver (integration/softcuda). Its times say nothing about a real one.\n"
	}
	d := gpu.Devices[0]
	return fmt.Sprintf("GPU 0 of %d: %s, %s, driver %s\n%s\n", len(gpu.Devices), d.Name, size(d.Memory), gpu.Driver, d.UUID)
}

// count sends the container a packet and prints its answer.
func count(ctx context.Context, k *harness.Container) (string, error) {
	answer, err := k.Ask(ctx, "count")
	if err != nil {
		return "", fmt.Errorf("%w\nthe container's output: %s", err, k.Logs())
	}
	fmt.Printf("  a packet to UDP port %d is answered: %s\n", k.Port, answer)
	return answer, nil
}

// timed runs a checkpoint or a restore and prints how long it took, and the
// shim's timeline of it. With an error comes the end of the daemon's log.
func timed(c *harness.Containerd, name string, do func() error) error {
	began := time.Now()
	if err := do(); err != nil {
		return fmt.Errorf("%w\nthe end of containerd's log:\n%s", err, c.LogTail(3000))
	}
	took := time.Since(began)
	t, err := c.Timeline(name)
	if err != nil {
		return err
	}
	fmt.Printf("  %s for ctr, of which the runtime took %s:\n%s", duration(took), duration(t.Took), draw(t))
	return nil
}
