// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// NVML tells of a process's GPU memory while it has some, and of drivers that
// CUDA's checkpoints cannot use.
func TestSoftSurvey(t *testing.T) {
	dev := devices(t, 2)
	h, w, ctx := softHelper(t, dev, nil), start(t, dev, nil, "counter"), t.Context()
	w.counts(101)
	uses := func() (bytes uint64, s Survey) {
		t.Helper()
		s, err := h.Survey(ctx)
		do(t, err)
		for _, d := range s.Devices {
			for _, u := range d.Users {
				if u.PID == w.pid {
					bytes += u.Bytes
				}
			}
		}
		return bytes, s
	}
	bytes, s := uses()
	if bytes == 0 || len(s.Devices) != 2 || s.DriverVersion == "" {
		t.Fatalf("%d bytes for the process in %+v", bytes, s)
	}
	if d := s.Devices[1]; d.UUID == s.Devices[0].UUID || d.Name == "" || d.Index != 1 || d.Minor != 1 || d.Memory == 0 || d.Free == 0 || d.Free > d.Memory {
		t.Errorf("the second GPU is %+v", d)
	}
	do(t, h.Lock(ctx, w.pid, 0))
	do(t, h.Checkpoint(ctx, w.pid))
	if bytes, s := uses(); bytes != 0 {
		t.Errorf("%d bytes for the checkpointed process in %+v", bytes, s)
	}
	do(t, h.Restore(ctx, w.pid, nil))
	do(t, h.Unlock(ctx, w.pid))

	old := softHelper(t, dev, func(o *Options) { o.Env = append(o.Env, "SOFTCUDA_DRIVER=550.54") })
	if _, err := old.Info(ctx); !errors.Is(err, ErrDriverTooOld) {
		t.Errorf("error %v, want ErrDriverTooOld", err)
	}
	if s, err := old.Survey(ctx); err != nil || s.DriverVersion != "550.54" || len(s.Devices) != 2 {
		t.Errorf("got %+v, error %v", s, err)
	}
	none := filepath.Join(t.TempDir(), "none")
	do(t, os.Mkdir(none, 0o700))
	if s, err := softHelper(t, none, nil).Survey(ctx); !errors.Is(err, ErrNoDriver) {
		t.Errorf("without nodes: got %+v, error %v", s, err)
	}
}
