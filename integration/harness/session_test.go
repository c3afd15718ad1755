// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// lenient notes the failure of a step instead of failing the test.
type lenient struct {
	*testing.T
	failure string
}

func (l *lenient) Fatal(args ...any)                 { l.failure = fmt.Sprint(args...); panic(l) }
func (l *lenient) Fatalf(format string, args ...any) { l.Fatal(fmt.Sprintf(format, args...)) }

// failure gives what a step says when it fails, and nothing when it does not.
func failure(t *testing.T, step func(T)) (text string) {
	l := &lenient{T: t}
	defer func() {
		if r := recover(); r != nil && r != any(l) {
			panic(r)
		}
		text = l.failure
	}()
	step(l)
	return ""
}

// What a program of tests was started with is not passed on.
func TestInherited(t *testing.T) {
	path := filepath.Join(t.TempDir(), "inherited")
	fd, err := unix.Open(path, unix.O_CREAT|unix.O_RDWR, 0o600) // without O_CLOEXEC
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	passed := func() bool {
		t.Helper()
		out, err := exec.Command("ls", "-l", "/proc/self/fd").CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return strings.Contains(string(out), path)
	}
	if !passed() {
		t.Error("a file that is passed on is not seen")
	}
	if err := keepInherited(); err != nil {
		t.Fatal(err)
	}
	if passed() {
		t.Error("a file is passed on")
	}
}

// softwareOnly has a session find the software GPU in a directory.
func softwareOnly(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "softcuda"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		if err := os.WriteFile(filepath.Join(dir, "softcuda", name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv(EnvBin, dir)
	t.Setenv(EnvGPU, "software")
}

// What is left to the end is done last first, whatever the tests' outcome, and
// fails the program if it fails.
func TestSession(t *testing.T) {
	softwareOnly(t)
	results := filepath.Join(t.TempDir(), "results.json")
	t.Setenv(EnvResults, results)
	broken := errors.New("broken")
	for _, test := range []struct {
		name          string
		prepare, left error
		tests, want   int
	}{
		{name: "all is well"},
		{name: "a test fails", tests: 1, want: 1},
		{name: "nothing is prepared", prepare: broken, want: 1},
		{name: "something is left", left: broken},
	} {
		t.Run(test.name, func(t *testing.T) {
			var order []string
			code, err := session(t.Context(), func() int {
				order = append(order, "tests")
				return test.tests
			}, func(s *Session) error {
				for _, name := range []string{"first", "second"} {
					s.AtEnd(func() error {
						order = append(order, name)
						return test.left
					})
				}
				return test.prepare
			})
			want := []string{"tests", "second", "first"}
			if test.prepare != nil {
				want = want[1:]
			}
			if !slices.Equal(order, want) {
				t.Errorf("the order was %v, want %v", order, want)
			}
			if failed := test.prepare != nil || test.left != nil; code != test.want || errors.Is(err, broken) != failed {
				t.Errorf("code %d, error %v", code, err)
			}
		})
	}
	if _, err := os.Stat(results); err == nil {
		t.Error("results of no test were written")
	}
	if _, err := session(t.Context(), func() int { return 0 }, func(s *Session) error {
		s.Results.Add(&ended{name: "TestA"})
		return nil
	}); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(results); err != nil {
		t.Error(err)
	}
	t.Setenv(EnvBin, "")
	if code, err := session(context.Background(), nil, nil); code != 1 || !errors.Is(err, ErrNoBins) {
		t.Errorf("without programs: code %d, error %v", code, err)
	}
}

func TestSizes(t *testing.T) {
	s := &Session{GPU: GPU{Kind: RealGPU}}
	for list, want := range map[string][]Size{
		"":            {{"1GiB", 1 << 30}},
		"48MiB,80GiB": {{"48MiB", 48 << 20}, {"80GiB", 80 << 30}},
	} {
		t.Setenv(EnvSizes, list)
		if got := s.Sizes(t); !slices.Equal(got, want) {
			t.Errorf("%q: %v, want %v", list, got, want)
		}
	}
	for _, list := range []string{"48", "1GiB,", "MiB", "-1MiB", "1 GiB"} {
		t.Setenv(EnvSizes, list)
		if text := failure(t, func(t T) { s.Sizes(t) }); !strings.Contains(text, EnvSizes) {
			t.Errorf("%q: %q", list, text)
		}
	}
	if arg := (Size{"1MiB", 1 << 20}).Arg(); arg != "1048576" {
		t.Error(arg)
	}
}

func TestSteps(t *testing.T) {
	refusal := errors.New("preflight: no CRIU")
	for want, err := range map[string]error{"": refusal, "no error": nil, "does not say": errors.New("preflight")} {
		text := failure(t, func(t T) { Says(t, err, "preflight", "no CRIU") })
		if (text == "") != (want == "") || !strings.Contains(text, want) {
			t.Errorf("%v: %q", err, text)
		}
	}
	t.Run("On GPU 0, twice: a/b_c", func(t *testing.T) {
		if name := Name(t); name != "teststeps-on-gpu-0-twice-a-b-c" {
			t.Error(name)
		}
	})
	spec := Gpuwork(t, RunSpec{Ports: 3}, "counter")
	if want := []string{"gpuwork", "counter", "--port", fmt.Sprint(spec.Port)}; spec.ID != "teststeps" || spec.Port == 0 || !slices.Equal(spec.Args, want) {
		t.Errorf("%+v", spec)
	}
	if spec = Gpuwork(t, RunSpec{ID: "k", Port: 1, Args: []string{"gpuwork"}}, "counter"); spec.ID != "k" || spec.Port != 1 || len(spec.Args) != 1 {
		t.Errorf("%+v", spec)
	}
	n := 0
	Within(t, "three", func() bool { n++; return n == 3 })
}

func TestFlipBit(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("abc"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"acc", "abc"} {
		FlipBit(t, file)
		if data, err := os.ReadFile(file); err != nil || string(data) != want {
			t.Errorf("%q, error %v; want %q", data, err, want)
		}
	}
	if text := failure(t, func(t T) { FlipBit(t, file+"-none") }); !strings.Contains(text, "flip a bit") {
		t.Error(text)
	}
}

func TestPathWithout(t *testing.T) {
	from := t.TempDir()
	for _, name := range daemonPrograms {
		if err := os.WriteFile(filepath.Join(from, name), []byte(name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	bins, err := NewBins(from)
	if err != nil {
		t.Fatal(err)
	}
	to := bins.PathWithout(t, t.TempDir(), "criu")
	for _, name := range daemonPrograms {
		data, err := os.ReadFile(filepath.Join(to, name))
		if there := err == nil && string(data) == name; there != (name != "criu") {
			t.Errorf("%s: %v", name, there)
		}
	}
}
