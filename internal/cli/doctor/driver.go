// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/cuda"
	"github.com/gpuckpt/gpuckpt/internal/node/driverroot"
)

const driverFix = "ubuntu-drivers install --gpgpu nvidia:580-server  # Ubuntu; elsewhere see https://docs.nvidia.com/datacenter/tesla/driver-installation-guide"

// GPUs is what the CUDA helper has found out about the driver and the GPUs.
type GPUs struct {
	// Helper is the program that was asked.
	Helper string
	// Driver is where the helper found the driver's libraries.
	Driver driverroot.Place
	// Info is CUDA's view, Survey NVML's. Either may have failed.
	Info      cuda.Info
	InfoErr   error
	Survey    cuda.Survey
	SurveyErr error
}

// AskDriver asks the helper that a shim would start. An error is part of the answer.
func AskDriver(ctx context.Context, n *Node) GPUs {
	path, err := n.helper()
	g := GPUs{Helper: path, InfoErr: err, SurveyErr: err}
	if err != nil {
		return g
	}
	g.Driver, err = driverroot.Find(n.DriverRoot, n.env("LD_LIBRARY_PATH"), n.CDISpecDirs)
	var h *cuda.Helper
	if err == nil {
		h, err = cuda.Start(ctx, cuda.Options{Path: path, LibraryDir: g.Driver.Dir, Env: n.Env})
	}
	if err != nil {
		g.InfoErr, g.SurveyErr = err, err
		return g
	}
	defer h.Close()
	g.Survey, g.SurveyErr = h.Survey(ctx)
	g.Info, g.InfoErr = h.Info(ctx)
	return g
}

// helper finds the CUDA helper as a shim does: beside the shim, or in $PATH.
func (n *Node) helper() (string, error) {
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
	version := cmp.Or(g.Survey.DriverVersion, g.Info.DriverVersion)
	switch {
	case g.Driver.Dir != "":
		a.ok("libraries", "%s (%s)", g.Driver.Dir, g.Driver.From)
	case g.Driver.From != "":
		a.ok("libraries", "where the host's loader looks")
	}
	if g.InfoErr == nil {
		a.ok("version", "%s, CUDA %s", version, g.Info.CUDAVersion)
	} else {
		found, fix := n.driverFailure(g, version)
		a.add(Failure, "version", found, "GPU containers can be neither checkpointed nor restored nor suspended", fix)
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

// driverFailure returns what CUDA says instead of its version, and what to do.
func (n *Node) driverFailure(g GPUs, version string) (found, fix string) {
	found = g.InfoErr.Error()
	said := strings.TrimPrefix(version+": "+found, ": ")
	var refused *cuda.Error
	switch {
	case errors.Is(g.InfoErr, cuda.ErrNoDriver) && g.SurveyErr == nil && version != "":
		branch, _, _ := strings.Cut(version, ".")
		return said, "apt-get install --yes libnvidia-compute-" + branch + "-server  # Ubuntu: the driver's library libcuda.so.1"
	case errors.Is(g.InfoErr, driverroot.ErrNotFound):
		return found, "# change driver_root in the configuration, or take it out to have the driver looked for"
	case errors.Is(g.InfoErr, cuda.ErrNoDriver), errors.Is(g.InfoErr, cuda.ErrDriverTooOld):
		return found, driverFix
	case errors.As(g.InfoErr, &refused) && refused.Result == 803:
		return said, "reboot  # the driver was updated while the old kernel module was loaded"
	case refused != nil:
		return said, "modprobe --all nvidia nvidia-uvm && nvidia-modprobe --unified-memory --create-nvidia-device-file=0"
	case g.Helper == "":
		return "not known without " + cuda.HelperName, installFix
	}
	return found, "ldd " + g.Helper + "  # what keeps it from running"
}

func checkGPUs(g GPUs) []Check {
	a := area{name: "gpu"}
	if g.SurveyErr != nil {
		return nil // the driver's check says why
	}
	if len(g.Survey.Devices) == 0 {
		a.add(Failure, "count", "none", "no container can have a GPU", "nvidia-smi  # shows what is wrong with them")
	}
	status := Failure
	if slices.ContainsFunc(g.Survey.Devices, func(d cuda.Device) bool { return unusable(d) == "" }) {
		status = Warning // others can be used
	}
	for _, d := range g.Survey.Devices {
		name := fmt.Sprint(d.Index)
		found := fmt.Sprintf("%s, %s, %s of %s free", d.Name, d.UUID, size(d.Free), size(d.Memory))
		smi := fmt.Sprintf("nvidia-smi --id=%d ", d.Index)
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

// unusable returns why a GPU's programs cannot be checkpointed: "MIG", "vGPU", "prohibited" or "".
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

func (n *Node) processes(prefix string) (found []string) {
	files, _ := filepath.Glob(n.path("proc/[0-9]*/comm"))
	for _, f := range files {
		pid := filepath.Base(filepath.Dir(f))
		if name := n.read("proc", pid, "comm"); strings.HasPrefix(name, prefix) {
			found = append(found, name+" ("+pid+")")
		}
	}
	return found
}
