// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/gpuckpt/gpuckpt/bench/report"
	"golang.org/x/sys/unix"
)

// sampleEvery is how often the machine's memory is looked at.
const sampleEvery = 20 * time.Millisecond

// hostMemory is /proc/meminfo, in bytes.
type hostMemory struct {
	total, available, shmem uint64
}

// readMemory reads /proc/meminfo.
func readMemory() (hostMemory, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return hostMemory{}, fmt.Errorf("read the machine's memory: %w", err)
	}
	return parseMemory(string(data))
}

func parseMemory(text string) (hostMemory, error) {
	var m hostMemory
	found := 0
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) != 3 || fields[2] != "kB" {
			continue
		}
		var to *uint64
		switch fields[0] {
		case "MemTotal:":
			to = &m.total
		case "MemAvailable:":
			to = &m.available
		case "Shmem:":
			to = &m.shmem
		default:
			continue
		}
		kib, err := strconv.ParseUint(fields[1], 10, 54)
		if err != nil {
			return hostMemory{}, fmt.Errorf("read the machine's memory: %w", err)
		}
		*to = kib << 10
		found++
	}
	if found != 3 {
		return hostMemory{}, errors.New("read the machine's memory: /proc/meminfo lacks a line")
	}
	return m, nil
}

// memorySampler watches the machine's memory.
type memorySampler struct {
	stopping chan struct{}
	done     sync.WaitGroup
	peak     report.MemoryPeak
	err      error
}

// startSampler begins to watch; nothing else should run on the machine.
func startSampler() (*memorySampler, error) {
	first, err := readMemory()
	if err != nil {
		return nil, err
	}
	s := &memorySampler{stopping: make(chan struct{})}
	s.done.Go(func() {
		ticker := time.NewTicker(sampleEvery)
		defer ticker.Stop()
		for {
			now, err := readMemory()
			if err != nil {
				s.err = err
				return
			}
			s.peak.Used = max(s.peak.Used, above(first.available, now.available))
			s.peak.Shmem = max(s.peak.Shmem, above(now.shmem, first.shmem))
			select {
			case <-s.stopping:
				return
			case <-ticker.C:
			}
		}
	})
	return s, nil
}

// stop gives the peak since the start.
func (s *memorySampler) stop() (report.MemoryPeak, error) {
	close(s.stopping)
	s.done.Wait()
	return s.peak, s.err
}

// above is a − b, or 0.
func above(a, b uint64) uint64 { return max(a, b) - b }

// warmPiece is what one thread touches at a time.
const warmPiece = 64 << 20

// warmMemory touches that much memory once, on all processors, and gives it
// back: some virtual machines get their memory from the host only then.
func warmMemory(bytes uint64) error {
	if bytes == 0 {
		return nil
	}
	area, err := unix.Mmap(-1, 0, int(bytes), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_NORESERVE)
	if err != nil {
		return fmt.Errorf("touch the machine's memory: %w", err)
	}
	_ = unix.Madvise(area, unix.MADV_HUGEPAGE) // small pages do as well
	pieces := make(chan []byte)
	var workers sync.WaitGroup
	var once sync.Once
	var failed error
	for range runtime.NumCPU() {
		workers.Go(func() {
			for piece := range pieces {
				if err := unix.Madvise(piece, unix.MADV_POPULATE_WRITE); err != nil {
					once.Do(func() { failed = fmt.Errorf("touch the machine's memory: %w", err) })
				}
			}
		})
	}
	for at := 0; at < len(area); at += warmPiece {
		pieces <- area[at:min(at+warmPiece, len(area))]
	}
	close(pieces)
	workers.Wait()
	return errors.Join(failed, unix.Munmap(area))
}
