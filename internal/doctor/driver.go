// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/docker/go-units"

	"github.com/gpuckpt/gpuckpt/cuda"
)

// driverFix is how to get a driver.
const driverFix = "ubuntu-drivers install --gpgpu nvidia:580-server  # Ubuntu; elsewhere see https://docs.nvidia.com/datacenter/tesla/driver-installation-guide"

// GPUs is what the CUDA helper has found out about the driver and the GPUs.
type GPUs struct {
	// Helper is the program that was asked.
	Helper string
	// Info is CUDA's view, Survey NVML's. Either may have failed.
	Info      cuda.Info
	InfoErr   error
	Survey    cuda.Survey
	SurveyErr error
}

// AskDriver starts the helper that a shim would start, and asks it. It never fails:
// an error is part of the answer.
func AskDriver(ctx context.Context, n *Node) GPUs {
	var g GPUs
	var err error
	if g.Helper, err = n.helper(); err == nil {
		var h *cuda.Helper
		if h, err = cuda.Start(ctx, cuda.Options{Path: g.Helper, Env: n.Env}); err == nil {
			defer h.Close()
			g.Survey, g.SurveyErr = h.Survey(ctx)
			g.Info, g.InfoErr = h.Info(ctx)
			return g
		}
	}
	g.InfoErr, g.SurveyErr = err, err
	return g
}

// helper finds the CUDA helper as a shim does: the configured, the one beside
// the shim, the first in $PATH.
func (n *Node) helper() (string, error) {
	if n.Helper != "" {
		return n.Helper, nil
	}
	if shim, err := n.Look(ShimName); err == nil {
		if shim, err = filepath.EvalSymlinks(shim); err == nil {
			beside := Node{Env: []string{"PATH=" + filepath.Dir(shim)}}
			if path, err := beside.Look(cuda.HelperName); err == nil {
				return path, nil
			}
		}
	}
	return n.Look(cuda.HelperName)
}

// CheckDriver looks at the driver and at each GPU.
func CheckDriver(n *Node, g GPUs) []Check {
	a := area{name: "driver"}
	version := g.Survey.DriverVersion
	if version == "" {
		version = g.Info.DriverVersion
	}
	var refused *cuda.Error
	const without = "GPU containers can be neither checkpointed nor restored nor suspended"
	switch {
	case g.InfoErr == nil:
		a.ok("version", "%s, CUDA %s", version, g.Info.CUDAVersion)
	case errors.Is(g.InfoErr, cuda.ErrNoDriver):
		if g.SurveyErr == nil && version != "" {
			a.add(Failure, "version", version+": "+g.InfoErr.Error(), without, "apt-get install --yes libnvidia-compute-"+branch(version)+"-server  # Ubuntu: the driver's library libcuda.so.1")
			break
		}
		a.add(Failure, "version", g.InfoErr.Error(), without, driverFix)
	case errors.Is(g.InfoErr, cuda.ErrDriverTooOld):
		a.add(Failure, "version", g.InfoErr.Error(), without, driverFix)
	case errors.As(g.InfoErr, &refused):
		fix := "modprobe --all nvidia nvidia-uvm && nvidia-modprobe --unified-memory --create-nvidia-device-file=0"
		if refused.Result == 803 {
			fix = "reboot  # the driver was updated while the old kernel module was loaded"
		}
		a.add(Failure, "version", version+": "+g.InfoErr.Error(), without, fix)
	case g.Helper == "":
		a.add(Failure, "version", "not known without "+cuda.HelperName, without, installFix)
	default:
		a.add(Failure, "version", g.InfoErr.Error(), without, "ldd "+g.Helper+"  # what keeps it from running")
	}
	if module := n.read("sys/module/nvidia/version"); module != "" && version != "" && module != version {
		a.add(Failure, "kernel module", "version "+module+", and its libraries have "+version, "no new CUDA program can start", "reboot")
	}
	if mps := n.processes("nvidia-cuda-mps"); len(mps) > 0 {
		a.add(Warning, "MPS", "runs: "+strings.Join(mps, ", "), "NVIDIA's driver cannot checkpoint programs that use a GPU through it", "echo quit | nvidia-cuda-mps-control")
	}
	if g.InfoErr == nil && !n.exists("dev/nvidia-uvm") && n.exists("sys/module/nvidia") {
		a.add(Warning, "/dev/nvidia-uvm", "missing", "containers get no unified memory device, and CUDA does not start in them", "nvidia-modprobe --unified-memory --create-nvidia-device-file=0")
	}
	return append(a.checks, checkGPUs(g)...)
}

// checkGPUs looks at each GPU.
func checkGPUs(g GPUs) []Check {
	a := area{name: "gpu"}
	if g.SurveyErr != nil {
		return nil // the driver's check says why
	}
	if len(g.Survey.Devices) == 0 {
		a.add(Failure, "count", "none", "no container can have a GPU", "nvidia-smi  # shows what is wrong with them")
	}
	usable := 0
	for _, d := range g.Survey.Devices {
		if unusable(d) == "" {
			usable++
		}
	}
	for _, d := range g.Survey.Devices {
		name := fmt.Sprint(d.Index)
		found := fmt.Sprintf("%s, %s, %s of %s free", d.Name, d.UUID, units.BytesSize(float64(d.Free)), units.BytesSize(float64(d.Memory)))
		smi := fmt.Sprintf("nvidia-smi --id=%d ", d.Index)
		status := Warning // others can be used
		if usable == 0 {
			status = Failure
		}
		const cannot = "NVIDIA's driver cannot checkpoint programs on it"
		switch unusable(d) {
		case "MIG":
			a.add(status, name, found+", MIG enabled", cannot, smi+"--multi-instance-gpu=0")
		case "vGPU":
			a.add(status, name, found+", a vGPU", cannot, "# give the machine a whole GPU by PCI pass-through")
		case "prohibited":
			a.add(status, name, found+", compute mode prohibited", "no CUDA program can use it", smi+"--compute-mode=DEFAULT")
		default:
			a.ok(name, "%s", found)
		}
		if d.Persistence != nil && !*d.Persistence {
			a.add(Warning, name+" persistence", "off", "while nobody uses the GPU, each checkpoint and restore waits up to half a second for the driver to start",
				smi+"--persistence-mode=1")
		}
	}
	return a.checks
}

// unusable returns what keeps a GPU's programs from being checkpointed: "MIG",
// "vGPU", "prohibited" or "".
func unusable(d cuda.Device) string {
	switch {
	case d.MIG != nil && *d.MIG:
		return "MIG"
	case d.Virtualization == "vgpu":
		return "vGPU"
	case d.ComputeMode == "prohibited":
		return "prohibited"
	}
	return ""
}

// branch returns "580" of "580.159.03".
func branch(version string) string {
	b, _, _ := strings.Cut(version, ".")
	return b
}

// processes names the running programs whose names begin with prefix, with their pids.
func (n *Node) processes(prefix string) (found []string) {
	files, err := filepath.Glob(n.path("proc/[0-9]*/comm"))
	if err != nil {
		return nil
	}
	for _, f := range files {
		pid := filepath.Base(filepath.Dir(f))
		if name := n.read("proc", pid, "comm"); strings.HasPrefix(name, prefix) {
			found = append(found, name+" ("+pid+")")
		}
	}
	return found
}
