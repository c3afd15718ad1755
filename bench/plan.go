// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/go-units"
	"github.com/gpuckpt/gpuckpt/bench/report"
)

// isOurs reports whether a method is this project's shim.
func isOurs(method string) bool {
	return method == report.Ours || method == report.Steered || method == report.Interposer || method == report.ByCRIU
}

// planned is a shape and the methods it is measured with, in turns.
type planned struct {
	report.Shape
	methods []string
}

// selection is what the command line asks for.
type selection struct {
	methods, contents, media, modes []string
	sizes                           []uint64
	procs                           []int
	// procsSizes are the sizes for cases of more than one process.
	procsSizes []uint64
	// gpus is how many GPUs processes are dealt out to, at most.
	gpus int
	// plain adds a container without CUDA, shm one with so many bytes in /dev/shm, and host one with
	// so many bytes of host memory; 0 for none.
	plain bool
	shm   uint64
	host  uint64
	// beside adds each case of one process again, with so many bytes of host memory of each kind beside
	// its GPU memory.
	beside    uint64
	hostKinds []string
}

// plan lists the cases in the order in which they are measured.
func (s selection) plan() []planned {
	var all []planned
	add := func(sh report.Shape) {
		p := planned{Shape: sh}
		for _, m := range s.methods {
			if m == report.CRIUPlugin && sh.Content == report.ContentNone {
				continue // its plugin has nothing to do, and there is no container
			}
			if m == report.ByCRIU && sh.Host == 0 {
				continue // it is ours
			}
			p.methods = append(p.methods, m)
		}
		if len(p.methods) > 0 {
			all = append(all, p)
		}
	}
	for _, media := range s.media {
		for _, mode := range s.modes {
			if s.plain {
				add(report.Shape{Content: report.ContentNone, Media: media, Mode: mode, Procs: 1})
			}
			if s.shm > 0 {
				add(report.Shape{Content: report.ContentNone, Shm: s.shm, Media: media, Mode: mode, Procs: 1})
			}
			if s.host > 0 {
				add(report.Shape{Content: report.ContentNone, Host: s.host, Media: media, Mode: mode, Procs: 1})
			}
			for _, procs := range s.procs {
				sizes := s.sizes
				if procs > 1 {
					sizes = s.procsSizes
				}
				for _, size := range sizes {
					for _, content := range s.contents {
						sh := report.Shape{Content: content, Size: size, Procs: procs, GPUs: min(procs, s.gpus), Media: media, Mode: mode}
						add(sh)
						for _, kind := range s.hostKinds {
							if procs > 1 || s.beside == 0 {
								continue
							}
							sh.Host, sh.HostKind = s.beside, ""
							if kind != report.HostKinds[0] {
								sh.HostKind = kind
							}
							add(sh)
						}
					}
				}
			}
		}
	}
	return all
}

// oneOf reads a list of words, each of which must be known.
func oneOf(flag, list string, known ...string) ([]string, error) {
	var words []string
	for word := range strings.SplitSeq(list, ",") {
		if !slices.Contains(known, word) {
			return nil, fmt.Errorf("--%s: %q is none of %s", flag, word, strings.Join(known, ", "))
		}
		if !slices.Contains(words, word) {
			words = append(words, word)
		}
	}
	return words, nil
}

// parseSize reads "16GiB", "64M" or a number of bytes.
func parseSize(text string) (uint64, error) {
	n, err := units.RAMInBytes(text)
	if err != nil || n < 0 || n > 1<<60 {
		return 0, fmt.Errorf("%q is not a size such as 16GiB or 64MiB", text)
	}
	return uint64(n), nil
}

// noSizes is a list of sizes without any.
const noSizes = "none"

// parseSizes reads a list of sizes above zero.
func parseSizes(flag, list string) ([]uint64, error) {
	var sizes []uint64
	for text := range strings.SplitSeq(list, ",") {
		n, err := parseSize(text)
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", flag, err)
		}
		if n == 0 {
			return nil, fmt.Errorf("--%s: %q is nothing to measure", flag, text)
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// parseCounts reads a list of numbers from 1 to 64.
func parseCounts(flag, list string) ([]int, error) {
	var counts []int
	for text := range strings.SplitSeq(list, ",") {
		n, err := strconv.Atoi(text)
		if err != nil || n < 1 || n > 64 {
			return nil, fmt.Errorf("--%s: %q is no number from 1 to 64", flag, text)
		}
		counts = append(counts, n)
	}
	return counts, nil
}
