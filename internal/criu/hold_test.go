// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"
)

// A program that runc starts in CRIU's place does nothing before Release, and finds no images. After it
// there are the images, and the words for CRIU. One that is not released ends.
func TestHold(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may make a directory of images")
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip("no C compiler")
	}
	for _, released := range []bool{true, false} {
		bundle := t.TempDir()
		plugins := Settings{Bundle: bundle}.PluginDir()
		if err := os.Mkdir(plugins, 0o700); err != nil {
			t.Fatal(err)
		}
		library := filepath.Join(plugins, PluginName)
		if out, err := exec.Command("gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", library, "plugin/hold.c").CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		h, err := NewHold(bundle)
		if err != nil {
			t.Fatal(err)
		}
		defer h.Close()
		var out bytes.Buffer
		criu := exec.Command("sh", "-c", `echo "$GPUCKPT_ENDED,$GPUCKPT_FREE,$GPUCKPT_HOLD"; exec cat "$0/descriptors.json"`, ImagesPath(bundle))
		criu.Env = []string{"PATH=" + os.Getenv("PATH"), "LD_PRELOAD=" + library, "GPUCKPT_HOLD=" + filepath.Join(plugins, holdName)}
		criu.Stdout = &out
		if err := criu.Start(); err != nil {
			t.Fatal(err)
		}
		waits := func() bool {
			locks, err := os.ReadFile("/proc/locks")
			if err != nil {
				t.Fatal(err)
			}
			return strings.Contains(string(locks), " -> FLOCK  ADVISORY  READ "+strconv.Itoa(criu.Process.Pid)+" ")
		}
		for !waits() {
			time.Sleep(time.Millisecond)
		}
		if names, err := os.ReadDir(ImagesPath(bundle)); err != nil || len(names) > 0 {
			t.Errorf("before the release there are %v, %v", names, err)
		}
		if !released {
			h.Close()
			if err := criu.Wait(); err == nil || out.Len() > 0 {
				t.Errorf("a program that is not released ends with %v, and says %q", err, out.String())
			}
			continue
		}
		from := t.TempDir()
		if err := os.WriteFile(filepath.Join(from, "descriptors.json"), []byte("[]"), 0o600); err != nil {
			t.Fatal(err)
		}
		images, err := Open(from).Copy(nil)
		if err != nil {
			t.Fatal(err)
		}
		defer images.Close()
		if err := h.Release(images, " 7:137", " 192.0.2.1:80"); err != nil {
			t.Fatal(err)
		}
		if err, want := criu.Wait(), " 7:137 , 192.0.2.1:80 ,\n[]"; err != nil || out.String() != want {
			t.Errorf("a program that is released says %q, %v; want %q", out.String(), err, want)
		}
		if h.Close(); exists(ImagesPath(bundle)) {
			t.Error("the link to the images is left")
		}
	}
}

func exists(path string) bool { _, err := os.Lstat(path); return err == nil }
