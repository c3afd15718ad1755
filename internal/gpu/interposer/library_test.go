// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build amd64

package interposer

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// build builds the interposer, its test program and the software GPU into a directory with device nodes.
func TestMain(m *testing.M) {
	code := m.Run()
	if built != "" {
		os.RemoveAll(built)
	}
	os.Exit(code)
}

var built string

func build(t *testing.T) (dir string) {
	t.Helper()
	if built != "" {
		return built
	}
	dir, err := os.MkdirTemp("", "gpuckpt-interposer-test-")
	if err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"make", "-s", "-C", "../../../interposer", "OUT=" + dir},
		{"make", "-s", "-C", "../../../integration/softcuda", "OUT=" + dir, "all", dir + "/conform"},
		{"make", "-s", "-C", "../../../integration/workload", "OUT=" + dir, "all"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "direct"), "../../../interposer/test.c", "-ldl"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "manages"), "../../../interposer/managedtest.c", "-ldl", "-pthread"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "happens"), "../../../interposer/eventstest.c", "-ldl"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "keeps"), "../../../interposer/keeptest.c", "-ldl"},
		{"gcc", "-O1", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", filepath.Join(dir, "gates"), "../../../interposer/gatetest.c", "-pthread"},
		{"gcc", "-O1", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", filepath.Join(dir, "copies"), "../../../interposer/copytest.c", "-pthread"},
	} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s (a C compiler and make are needed): %v\n%s", strings.Join(args, " "), err, out)
		}
	}
	for _, name := range []string{"nvidiactl", "nvidia0"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	built = dir
	return dir
}

// command is a program with the interposer on the software GPU.
func command(dir, program string, env ...string) *exec.Cmd {
	cmd := exec.Command(program)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "LD_PRELOAD=" + filepath.Join(dir, LibraryName), "LD_LIBRARY_PATH=" + dir, "SOFTCUDA_DEV=" + dir}, env...)
	return cmd
}

func preloaded(dir, program string, env ...string) (string, error) {
	out, err := command(dir, program, env...).CombinedOutput()
	return string(out), err
}

func TestLibrary(t *testing.T) {
	dir := build(t)
	t.Run("program", func(t *testing.T) { program(t, dir) })
	t.Run("managed memory", func(t *testing.T) { managed(t, dir) })
	t.Run("events", func(t *testing.T) { events(t, dir) })
	t.Run("passes through", func(t *testing.T) { passesThrough(t, dir) })
	for _, name := range []string{"copies", "gates"} {
		t.Run(name, func(t *testing.T) {
			if out, err := exec.Command(filepath.Join(dir, name)).CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
		})
	}
}

// Managed memory of the interposer's is as the driver's, but that it is checkpointed, and there is not more of it than
// the interposer says. Without the interposer, and where it is off, all of it is the driver's.
func managed(t *testing.T, dir string) {
	t.Helper()
	const left = "gpuckpt interposer: managed memory of more than 1 MiB at once, or of 64 MiB in all, is left to the driver, which refuses a checkpoint of it\n"
	if out, err := preloaded(dir, filepath.Join(dir, "manages")); err != nil || out != left {
		t.Errorf("%v: %s", err, out)
	}
	const off = "gpuckpt interposer: GPUCKPT_INTERPOSER=off: it does nothing here\n"
	if out, err := preloaded(dir, filepath.Join(dir, "manages"), "GPUCKPT_INTERPOSER=off"); err != nil || out != off {
		t.Errorf("off: %v: %s", err, out)
	}
	conforms(t, dir, "managed")
}

// conforms runs a test of the software GPU's with the interposer.
func conforms(t *testing.T, dir, test string) {
	t.Helper()
	cmd := command(dir, filepath.Join(dir, "conform"))
	cmd.Args = append(cmd.Args, filepath.Join(dir, "gpuwork"), test)
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "ok    "+test) {
		t.Errorf("%v: %s", err, out)
	}
}

// Events for other processes are as the driver's, but that they are no part of a graph.
func events(t *testing.T, dir string) {
	t.Helper()
	const graph = "gpuckpt interposer: an event that processes can share cannot be part of a graph, or of another context's work, here: start the program without dev.gpuckpt.interposer\n"
	if out, err := preloaded(dir, filepath.Join(dir, "happens")); err != nil || out != graph {
		t.Errorf("%v: %s", err, out)
	}
	conforms(t, dir, "events")
}

// What a program sees of the driver with its interposer. It says so on stderr, once, where it refuses.
func program(t *testing.T, dir string) {
	t.Helper()
	out, err := preloaded(dir, filepath.Join(dir, "direct"))
	if err != nil || out != "" {
		t.Errorf("%v: %s", err, out)
	}
	// Programs without CUDA do not notice it, also where all functions are looked up at the start.
	for _, env := range []string{"A=b", "LD_BIND_NOW=1"} {
		if out, err := preloaded(dir, "/bin/true", env); err != nil || out != "" {
			t.Errorf("%s: %v: %s", env, err, out)
		}
	}
}

// Told so, or with a driver that it does not know, it leaves all to the driver: IPC works then.
func passesThrough(t *testing.T, dir string) {
	t.Helper()
	for _, env := range []string{"GPUCKPT_INTERPOSER=off", "SOFTCUDA_CONF=" + filepath.Join(dir, "old")} {
		if err := os.WriteFile(filepath.Join(dir, "old"), []byte("cuda = 11080\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := preloaded(dir, filepath.Join(dir, "direct"), env)
		if err == nil || !strings.Contains(out, "!memcmp(handle, \"gpck\", 4) is not so") || strings.Count(out, "it does nothing here") != 1 {
			t.Errorf("%s: %v: %s", env, err, out)
		}
	}
}
