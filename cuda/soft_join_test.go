// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// A joined helper is the host's root among a container's files, which may be
// hostile: whatever the driver asks for, no program or library of the container's
// is run.
func TestSoftJoinedHelperRunsNothingOfTheContainer(t *testing.T) {
	dir := soft(t)
	source, built := filepath.Join(t.TempDir(), "hostile.c"), t.TempDir()
	do(t, os.WriteFile(source, []byte(`#include <fcntl.h>
		__attribute__((constructor)) static void run(void) { open("/dev/library-ran", O_CREAT, 0600); }`), 0o600))
	library := filepath.Join(built, "libnvidia-ptxjitcompiler.so.1")
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-o", library, source).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	// On the host it is an empty directory.
	inside := t.TempDir()
	w := contained(t, "nvidiactl nvidia0", "counter")
	w.counts(102)
	in := func(script string) {
		t.Helper()
		cmd := exec.Command("nsenter", "--target", fmt.Sprint(w.pid), "--mount", "sh", "-ec", script)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	in(fmt.Sprintf("mount --bind %s %s", built, inside))
	in("printf '#!/bin/sh\\n: >/dev/program-ran\\n' >/dev/modprobe; chmod +x /dev/modprobe")

	ran := func(what string) bool {
		_, err := os.Stat(fmt.Sprintf("/proc/%d/root/dev/%s-ran", w.pid, what))
		return err == nil
	}
	for name, libraries := range map[string]string{
		"driver on the host":             dir + ":" + inside,
		"driver only in the container's": inside,
	} {
		t.Run(name, func(t *testing.T) {
			if libraries == inside { // with a driver of its own
				copied, err := os.ReadFile(filepath.Join(dir, "libcuda.so.1"))
				do(t, err)
				do(t, os.WriteFile(filepath.Join(built, "libcuda.so.1"), copied, 0o700))
			}
			h := softHelper(t, "/nonexistent", func(o *Options) {
				o.Join = w.pid
				o.Env = append(o.Env, "LD_LIBRARY_PATH="+libraries, "SOFTCUDA_MODPROBE=/dev/modprobe")
			})
			info, err := h.Info(t.Context())
			if libraries == inside {
				wants(t, err, ErrNoDriver, "libcuda.so.1")
			} else if do(t, err); len(info.GPUs) != 1 {
				t.Errorf("got %+v", info)
			}
			for _, what := range []string{"library", "program"} {
				if ran(what) {
					t.Errorf("a %s of the container's ran", what)
				}
			}
		})
	}
	// They do run for whoever lets them.
	in(fmt.Sprintf("LD_PRELOAD=%s /bin/true; /dev/modprobe", filepath.Join(inside, filepath.Base(library))))
	if !ran("library") || !ran("program") {
		t.Error("the container's library or program does nothing: the test is wrong")
	}
}
