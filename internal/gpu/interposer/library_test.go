// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build amd64

package interposer

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
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
	soft := []string{"make", "-s", "-C", "../../../integration/softcuda", "OUT=" + dir, "all", dir + "/conform"}
	if sanitizer != "" {
		soft = append(soft, "CFLAGS=-O2 -std=gnu17 -D_GNU_SOURCE "+strings.Join(addresses[sanitizer], " "))
	}
	for _, args := range [][]string{
		{"make", "-s", "-C", "../../../interposer", "OUT=" + dir, "SANITIZE=" + sanitizer},
		soft,
		{"make", "-s", "-C", "../../../integration/workload", "OUT=" + dir, "all"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "direct"), "../../../interposer/test.c", "-ldl"},
		{"gcc", "-O1", "-Wall", "-Werror", "-fPIC", "-shared", "-o", filepath.Join(dir, "linked.so"), "../../../interposer/linkedtest.c", filepath.Join(dir, "libcuda.so.1")},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "manages"), "../../../interposer/managedtest.c", "-ldl", "-pthread"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "happens"), "../../../interposer/eventstest.c", "-ldl"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "keeps"), "../../../interposer/keeptest.c", "-ldl", "-pthread"},
		{"gcc", "-O1", "-Wall", "-Werror", "-o", filepath.Join(dir, "threads"), "../../../interposer/threadstest.c", "-ldl", "-pthread"},
		{"gcc", "-O1", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", filepath.Join(dir, "gates"), "../../../interposer/gatetest.c", "-pthread"},
		{"gcc", "-O1", "-Wall", "-Werror", "-D_GNU_SOURCE", "-o", filepath.Join(dir, "copies"), "../../../interposer/copytest.c", "-pthread"},
	} {
		if sanitizer != "" && args[0] == "gcc" {
			args = slices.Concat(args, addresses[sanitizer], []string{"-g", "-fsanitize=" + sanitizer, "-fno-sanitize-recover=all"})
		}
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
	cmd.Env = slices.Concat([]string{"PATH=" + os.Getenv("PATH")}, environment(dir), env)
	return cmd
}

func environment(dir string) []string {
	return append([]string{"LD_PRELOAD=" + runtimes() + filepath.Join(dir, LibraryName), "LD_LIBRARY_PATH=" + dir, "SOFTCUDA_DEV=" + dir}, sanitizerOptions...)
}

// sanitizer is what the interposer and the C programs of these tests are built with, "thread" or "address,undefined";
// "" for none. What it finds ends a program, and so fails a test.
var sanitizer = os.Getenv("GPUCKPT_SANITIZER")

// addresses have the software GPU's memory where the sanitizer has nothing of its own.
var addresses = map[string][]string{
	"thread":            {"-DFIRST_ADDRESS=0x1000000000", "-DSPAN_BITS=34"},
	"address,undefined": {"-DFIRST_ADDRESS=0x120000000000", "-DSPAN_BITS=40", "-DFIRST_RESERVED=0x110000000000"},
}

var sanitizerOptions = []string{
	"TSAN_OPTIONS=halt_on_error=1:die_after_fork=0",
	"ASAN_OPTIONS=detect_leaks=0",
	"UBSAN_OPTIONS=print_stacktrace=1",
}

// runtimes returns what is to be preloaded before the interposer, for programs that are built without a sanitizer.
var runtimes = sync.OnceValue(func() (paths string) {
	for name := range strings.SplitSeq(sanitizer, ",") {
		library := map[string]string{"thread": "libtsan.so", "address": "libasan.so", "undefined": "libubsan.so"}[name]
		if library == "" {
			continue
		}
		out, err := exec.Command("gcc", "-print-file-name="+library).Output()
		if err != nil {
			panic(err)
		}
		paths += strings.TrimSpace(string(out)) + ":"
	}
	return paths
})

func preloaded(dir, program string, env ...string) (string, error) {
	out, err := command(dir, program, env...).CombinedOutput()
	return string(out), err
}

func TestLibrary(t *testing.T) {
	dir := build(t)
	t.Run("program", func(t *testing.T) { program(t, dir) })
	t.Run("managed memory", func(t *testing.T) { managed(t, dir) })
	t.Run("events", func(t *testing.T) { events(t, dir) })
	for _, name := range []string{"peers", "ends", "events", "forks", "imports"} {
		t.Run("threads, "+name, func(t *testing.T) { threads(t, dir, name) })
	}
	t.Run("passes through", func(t *testing.T) { passesThrough(t, dir) })
	for _, name := range []string{"copies", "gates"} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(filepath.Join(dir, name))
			cmd.Env = sanitizerOptions
			if out, err := cmd.CombinedOutput(); err != nil {
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

// threads runs a part of threadstest.c, with eight GPUs.
func threads(t *testing.T, dir, name string) {
	t.Helper()
	nodes := t.TempDir()
	for i := range 8 {
		if err := errors.Join(os.WriteFile(filepath.Join(nodes, fmt.Sprintf("nvidia%d", i)), nil, 0o600), os.WriteFile(filepath.Join(nodes, "nvidiactl"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
	}
	cmd := command(dir, filepath.Join(dir, "threads"), "SOFTCUDA_DEV="+nodes)
	cmd.Args = append(cmd.Args, name)
	if out, err := cmd.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("%v: %s", err, out)
	}
}

// What a program sees of the driver with its interposer. It says so on stderr, once, where it refuses.
func program(t *testing.T, dir string) {
	t.Helper()
	out, err := preloaded(dir, filepath.Join(dir, "direct"))
	if err != nil || out != "" {
		t.Errorf("%v: %s", err, out)
	}
	linked := command(dir, filepath.Join(dir, "direct"), "LD_PRELOAD="+runtimes()+filepath.Join(dir, LibraryName)+":"+filepath.Join(dir, "linked.so"))
	linked.Args = append(linked.Args, "linked")
	if out, err := linked.CombinedOutput(); err != nil || len(out) > 0 {
		t.Errorf("with another library: %v: %s", err, out)
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

// A C library of 2014 has all that the interposer names, and has it in itself: what was elsewhere is weak.
func TestOldCLibrary(t *testing.T) {
	f, err := elf.Open(filepath.Join(build(t), LibraryName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	path, err := exec.Command("gcc", "-print-file-name=libc.so.6").Output()
	if err != nil {
		t.Fatal(err)
	}
	table, err := exec.Command("objdump", "-T", strings.TrimSpace(string(path))).Output()
	if err != nil {
		t.Fatal(err)
	}
	since := make(map[string]int) // the minor versions that programs of today are linked to
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		var minor int
		if len(fields) < 2 || strings.Contains(line, "*UND*") {
			continue
		}
		if n, _ := fmt.Sscanf(fields[len(fields)-2], "GLIBC_2.%d", &minor); n == 1 {
			since[fields[len(fields)-1]] = minor
		}
	}
	named := 0
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF || elf.ST_BIND(s.Info) == elf.STB_WEAK {
			continue
		}
		named++
		if minor, ok := since[s.Name]; !ok || minor > 17 {
			t.Errorf("%s is of glibc 2.%d (found: %t)", s.Name, minor, ok)
		}
	}
	if named < 20 {
		t.Errorf("it names %d functions", named)
	}
}
