// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func softUUID(n int) string { return "GPU-5af7c0da-0000-4000-8000-00000000000" + string(rune('0'+n)) }

// Sets of pairs are tried until one is the process's own: of two processes one
// uses both GPUs and one, by CUDA_VISIBLE_DEVICES, the second. Both want pairs
// of both.
func TestSoftRestoreRemapped(t *testing.T) {
	dev, ctx := devices(t, 2), t.Context()
	h := softHelper(t, dev, nil)
	both := start(t, dev, nil, "pattern", "--bytes", "4M", "--gpus", "2")
	one := start(t, dev, []string{"CUDA_VISIBLE_DEVICES=1"}, "pattern", "--bytes", "4M")
	for _, w := range []*work{both, one} {
		if got := w.ask("verify"); got != "bad=0" {
			t.Fatal(got)
		}
	}
	procs, err := Find(ctx, h, []int{both.pid, one.pid})
	do(t, err)
	if len(procs) != 2 {
		t.Fatalf("found %+v", procs)
	}
	do(t, procs.Lock(ctx, h, 10*time.Second))
	do(t, procs.Checkpoint(ctx, h))

	a, b := Pair{Old: softUUID(0), New: softUUID(1)}, Pair{Old: softUUID(1), New: softUUID(0)}
	wrong := map[int][][]Pair{both.pid: {{a}, {b}}, one.pid: {{b}, {a, b}}}
	_, err = procs.RestoreRemapped(ctx, h, wrong)
	refused(t, err, InvalidValue)
	both.is(h, Checkpointed)
	one.is(h, Checkpointed) // it came through, onto the first GPU, and was taken back

	taken, err := procs.RestoreRemapped(ctx, h, map[int][][]Pair{both.pid: {{a}, {a, b}}, one.pid: {nil}})
	do(t, err)
	if taken[both.pid] != 1 || taken[one.pid] != 0 || len(taken) != 2 {
		t.Errorf("the sets taken are %v", taken)
	}
	do(t, procs.Unlock(ctx, h))
	for w, want := range map[*work]string{both: "gpus=2 " + softUUID(1) + " " + softUUID(0), one: "gpus=1 " + softUUID(0)} {
		if got := w.ask("verify"); got != "bad=0" {
			t.Error(got)
		}
		if got := w.ask("info"); !strings.Contains(got, want) {
			t.Errorf("info %q, want %q", got, want)
		}
	}
}

// What NVML knows beside CUDA: memory in use, virtual and partitioned GPUs.
func TestSoftInfoFromNVML(t *testing.T) {
	dev := devices(t, 3)
	conf := filepath.Join(t.TempDir(), "conf")
	do(t, os.WriteFile(conf, []byte("gpu0.mig=1\ngpu1.vgpu=1\ngpu2.memory_mib=64\n"), 0o600))
	h := softHelper(t, dev, func(o *Options) { o.Env = append(o.Env, "SOFTCUDA_CONF="+conf) })
	w := start(t, dev, []string{"SOFTCUDA_CONF=" + conf}, "pattern", "--bytes", "32M", "--gpu", "1")
	if got := w.ask("verify"); got != "bad=0" {
		t.Fatal(got)
	}
	info, err := h.Info(t.Context())
	do(t, err)
	if p, err := os.FindProcess(w.pid); err != nil || p.Kill() != nil {
		t.Fatal(err)
	}
	for range 100 { // until it has ended
		if may, err := MayUseCUDA(w.pid); err == nil && !may {
			break
		}
		time.Sleep(50 * time.Millisecond)
	}
	if now, err := h.InfoNow(t.Context()); err != nil || now.GPUs[1].Free != 64<<20 {
		t.Errorf("once the process has ended: %+v, error %v", now.GPUs, err)
	}
	if len(info.GPUs) != 2 || info.GPUs[0].UUID != softUUID(1) || !info.GPUs[0].VGPU || info.GPUs[1].VGPU {
		t.Fatalf("GPUs %+v", info.GPUs)
	}
	if g := info.GPUs[1]; g.Free == 0 || g.Free > 32<<20 || g.Memory != 64<<20 {
		t.Errorf("GPU 2: %d of %d bytes free", g.Free, g.Memory)
	}
	if p := info.Partitioned; len(p) != 1 || p[0].UUID != softUUID(0) || p[0].Minor != 0 || p[0].Name != "Software GPU" || p[0].Memory == 0 {
		t.Errorf("partitioned %+v", p)
	}
}
