// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

const (
	uuidA = "GPU-ac739775-045d-4094-5e9b-4ca9cf57ebec"
	uuidB = "GPU-50bfc93b-52b4-cb57-7e91-b4095c5b2f72"
)

func information(uuid, minor string) string {
	return "Model: \t\t NVIDIA H200\nIRQ:   \t\t 66\nGPU UUID: \t " + uuid + "\nVideo BIOS: \t 96.00.bc.00.01\nBus Type: \t PCIe\n" +
		"Bus Location: \t 0000:01:00.0\nDevice Minor: \t " + minor + "\nGPU Excluded:\t No\n"
}

// The lines of a file are as driver 580 writes them.
func TestUUIDs(t *testing.T) {
	const unknown = "GPU-????????-????-????-????-????????????"
	for _, test := range []struct {
		name   string
		files  []string
		minors []int
		want   []string
		err    string
	}{
		{"both", []string{information(uuidA, "0"), information(uuidB, "1")}, []int{1, 0}, []string{uuidA, uuidB}, ""},
		{"by the bus", []string{information(uuidB, "1"), information(uuidA, "0")}, []int{0, 1}, []string{uuidB, uuidA}, ""},
		{"one", []string{information(uuidA, "0"), information(uuidB, "1")}, []int{1}, []string{uuidB}, ""},
		{"upper case", []string{information("GPU-"+strings.ToUpper(uuidA[4:]), "0")}, []int{0}, []string{uuidA}, ""},
		{"the other not used yet", []string{information(unknown, "0"), information(uuidB, "1")}, []int{1}, []string{uuidB}, ""},
		{"not used yet", []string{information(unknown, "0"), information(uuidB, "1")}, []int{0}, nil, "/dev/nvidia0"},
		{"not there", []string{information(uuidA, "0")}, []int{0, 3}, nil, "/dev/nvidia3"},
		{"no such directory", nil, []int{0}, nil, "/dev/nvidia0"},
		{"without a minor", []string{"GPU UUID: " + uuidA + "\n"}, []int{0}, nil, "/dev/nvidia0"},
		{"a minor that is none", []string{information(uuidA, "-1")}, []int{-1}, nil, "/dev/nvidia-1"},
		{"the same twice", []string{information(uuidA, "0"), information(uuidB, "0")}, []int{0}, nil, "two GPUs"},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "gpus")
			for i, text := range test.files {
				gpu := filepath.Join(dir, "0000:0"+string(rune('1'+i))+":00.0")
				do(t, os.MkdirAll(gpu, 0o755))
				do(t, os.WriteFile(filepath.Join(gpu, "information"), []byte(text), 0o600))
			}
			got, err := UUIDs(dir, test.minors)
			if !slices.Equal(got, test.want) || (err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
				t.Errorf("got %v, error %v; want %v, error %q", got, err, test.want, test.err)
			}
		})
	}
}

func FuzzInformation(f *testing.F) {
	f.Add(information(uuidA, "0"))
	f.Add("GPU UUID:\nDevice Minor: 99999999999\n")
	f.Fuzz(func(t *testing.T, text string) {
		minor, uuid, err := parseInformation(text)
		if err != nil {
			return
		}
		if again, same, err := parseInformation(information(uuid, "7")); err != nil || again != 7 || same != uuid || minor < 0 {
			t.Errorf("%q gives minor %d and UUID %q, which is read as %q, error %v", text, minor, uuid, same, err)
		}
	})
}

// A helper that is to see some GPUs lists those only, by the indices that they
// have on the machine.
func TestSoftVisible(t *testing.T) {
	h := softHelper(t, devices(t, 3), func(o *Options) { o.Visible = []string{softUUID(2), softUUID(1)} })
	info, err := h.Info(t.Context())
	do(t, err)
	if len(info.GPUs) != 2 {
		t.Fatalf("GPUs %+v", info.GPUs)
	}
	for i, want := range []int{2, 1} {
		if g := info.GPUs[i]; g.UUID != softUUID(want) || g.Index != want || g.Minor != want {
			t.Errorf("GPU %d is %+v, want the machine's GPU %d", i, g, want)
		}
	}
}

// A process that saw two GPUs and used one does not come back where one is left.
func TestSoftRestoreWithFewer(t *testing.T) {
	dev, ctx := devices(t, 2), t.Context()
	h := softHelper(t, dev, nil)
	w := start(t, dev, []string{"CUDA_VISIBLE_DEVICES=0"}, "pattern", "--bytes", "4M")
	if got := w.ask("verify"); got != "bad=0" {
		t.Fatal(got)
	}
	do(t, h.Lock(ctx, w.pid, 0))
	do(t, h.Checkpoint(ctx, w.pid))
	away, back := filepath.Join(dev, "nvidia1"), filepath.Join(dev, "away")
	do(t, os.Rename(away, back))
	refused(t, h.Restore(ctx, w.pid, nil), NotSupported)
	w.is(h, Checkpointed)
	do(t, os.Rename(back, away))
	do(t, h.Restore(ctx, w.pid, nil))
	do(t, h.Unlock(ctx, w.pid))
	if got := w.ask("verify"); got != "bad=0" {
		t.Error(got)
	}
}

// NVML tells of the GPUs while CUDA still brings them up, and tells the same.
func TestSoftInfoEarly(t *testing.T) {
	dir, ctx := t.TempDir(), t.Context()
	up, begun, slow := filepath.Join(dir, "up"), filepath.Join(dir, "begun"), filepath.Join(dir, "slow")
	script := fmt.Sprintf("#!/bin/sh\ntouch %s\nuntil [ -e %s ]; do sleep 0.01; done\n", begun, up)
	do(t, os.WriteFile(slow, []byte(script), 0o700))
	h := softHelper(t, devices(t, 3), func(o *Options) {
		o.Visible = []string{softUUID(1), softUUID(2)}
		o.Env = append(o.Env, "SOFTCUDA_MODPROBE="+slow)
	})
	early, err := h.InfoEarly(ctx)
	do(t, err)
	within(t, func() { // the GPUs come up without anybody asking for more
		for _, err := os.Stat(begun); err != nil; _, err = os.Stat(begun) {
			time.Sleep(10 * time.Millisecond)
		}
	})
	do(t, os.WriteFile(up, nil, 0o600))
	info, err := h.Info(ctx)
	do(t, err)
	info.CUDAVersion = ""
	if !reflect.DeepEqual(early, info) || len(early.GPUs) != 2 || early.GPUs[0].UUID != softUUID(1) {
		t.Errorf("early %+v\nthen  %+v", early, info)
	}
}

// A driver that cannot bring up its GPUs says so later.
func TestSoftInfoEarlyWithoutCUDA(t *testing.T) {
	dev := devices(t, 1)
	h := softHelper(t, dev, func(o *Options) { o.Visible = []string{softUUID(7)} })
	info, err := h.InfoEarly(t.Context())
	do(t, err)
	if len(info.GPUs) != 0 {
		t.Errorf("GPUs %+v", info.GPUs)
	}
	_, err = h.Info(t.Context())
	refused(t, err, NoDevice)
}

// Pairs that are read are written and read again as they were, and no GPU is in two of them.
func FuzzParsePairs(f *testing.F) {
	f.Add(uuidA + "=" + uuidB)
	f.Add(uuidA + "=" + uuidB + "," + uuidA + "=" + uuidB)
	f.Add("GPU-0=,=")
	f.Fuzz(func(t *testing.T, text string) {
		pairs, err := ParsePairs(text)
		if err != nil {
			return
		}
		var words []string
		for _, p := range pairs {
			words = append(words, p.Old+"="+p.New)
		}
		if again, err := ParsePairs(strings.Join(words, ",")); err != nil || !slices.Equal(again, pairs) {
			t.Errorf("%q became %v, and then %v, %v", text, pairs, again, err)
		}
	})
}
