// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Fuzz-keep takes over what a fuzz run has found: of each target's corpus the few inputs that reach
// what all of it reaches, which it writes into testdata/fuzz of the target's package. CORPUS is the
// folder "corpus" of the run's results. It leaves out inputs larger than 16 KiB, and those that
// reach nothing that the seeds and the inputs in the repository do not. It must run at the root of
// the repository, as root.
//
//	go run ./hack/fuzz-keep [-most N] CORPUS [PACKAGE/FuzzNAME...]
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// maxInput bounds an input that is kept, in bytes.
const maxInput = 16 << 10

func main() {
	most := flag.Int("most", 12, "inputs of a target at most")
	flag.Parse()
	if flag.NArg() < 1 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(flag.Arg(0), flag.Args()[1:], *most); err != nil {
		fmt.Fprintln(os.Stderr, "fuzz-keep:", err)
		os.Exit(1)
	}
}

func run(corpus string, wanted []string, most int) error {
	work, err := os.MkdirTemp("", "fuzz-keep-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	dirs, err := filepath.Glob(filepath.Join(corpus, "*"))
	for deeper := dirs; err == nil && len(deeper) > 0; dirs = append(dirs, deeper...) {
		var next []string
		for _, dir := range deeper {
			found, _ := filepath.Glob(filepath.Join(dir, "*")) // the pattern is sound
			next = append(next, found...)
		}
		deeper = next
	}
	if err != nil {
		return err
	}
	slices.Sort(dirs)
	for _, dir := range slices.Compact(dirs) {
		target, err := filepath.Rel(corpus, dir)
		if err != nil || !strings.HasPrefix(filepath.Base(dir), "Fuzz") || len(wanted) > 0 && !slices.Contains(wanted, target) {
			continue
		}
		if err := keep(work, dir, target, most); err != nil {
			return fmt.Errorf("%s: %w", target, err)
		}
	}
	return nil
}

// input is one of a corpus: its file and the blocks of code that it reaches.
type input struct {
	file   string
	bytes  int64
	blocks map[string]bool
}

// keep chooses among one target's inputs.
func keep(work, dir, target string, most int) error {
	pkg, name := filepath.Split(target)
	pkg = filepath.Clean(pkg)
	program := filepath.Join(work, strings.ReplaceAll(pkg, "/", "-"))
	if _, err := os.Stat(program); err != nil {
		cmd := exec.Command("go", "test", "-c", "-cover", "-coverpkg=./...", "-o", program, "./"+pkg)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	home, err := os.MkdirTemp(work, "home-")
	if err != nil {
		return err
	}
	at := filepath.Join(home, "testdata", "fuzz", name)
	if err := os.MkdirAll(at, 0o755); err != nil {
		return err
	}
	ours := filepath.Join(pkg, "testdata", "fuzz", name)
	if _, err := os.Stat(ours); err == nil {
		if err := os.CopyFS(at, os.DirFS(ours)); err != nil {
			return err
		}
	}
	reached, err := reaches(program, home, "^"+name+"$")
	if err != nil {
		return err
	}
	known, err := os.ReadDir(at)
	if err != nil {
		return err
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var inputs []input
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || info.Size() > maxInput {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err == nil {
			err = os.WriteFile(filepath.Join(at, e.Name()), data, 0o600)
		}
		if err != nil {
			return err
		}
		blocks, err := reaches(program, home, "^"+name+"$/^"+e.Name()+"$")
		if err != nil {
			return fmt.Errorf("%s: %w", e.Name(), err)
		}
		inputs = append(inputs, input{e.Name(), info.Size(), blocks})
	}
	kept := 0
	for len(known)+kept < most && len(inputs) > 0 {
		news := func(i input) (n int) {
			for b := range i.blocks {
				if !reached[b] {
					n++
				}
			}
			return n
		}
		best := slices.MaxFunc(inputs, func(a, b input) int {
			return cmp.Or(cmp.Compare(news(a), news(b)), cmp.Compare(b.bytes, a.bytes), cmp.Compare(b.file, a.file))
		})
		if news(best) == 0 {
			break
		}
		for b := range best.blocks {
			reached[b] = true
		}
		if err := os.MkdirAll(ours, 0o755); err != nil {
			return err
		}
		data, err := os.ReadFile(filepath.Join(dir, best.file))
		if err == nil {
			err = os.WriteFile(filepath.Join(ours, best.file), data, 0o600)
		}
		if err != nil {
			return err
		}
		kept++
	}
	fmt.Printf("%-44s %5d inputs, %2d kept\n", target, len(inputs), kept)
	return nil
}

// reaches returns the blocks of code that tests reach. An input that fails is an error.
func reaches(program, home, tests string) (map[string]bool, error) {
	profile := filepath.Join(home, "profile")
	cmd := exec.Command(program, "-test.run", tests, "-test.coverprofile", profile)
	cmd.Dir = home
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	data, err := os.ReadFile(profile)
	if err != nil {
		return nil, err
	}
	blocks := make(map[string]bool)
	for lines := bufio.NewScanner(bytes.NewReader(data)); lines.Scan(); {
		// FILE:FROM,TO STATEMENTS COUNT
		if words := strings.Fields(lines.Text()); len(words) == 3 && words[2] != "0" {
			blocks[words[0]] = true
		}
	}
	return blocks, nil
}
