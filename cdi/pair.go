// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
)

// PairsAnnotation is a container's annotation that decides which GPU takes the place of which GPU
// of the checkpoint: "OLD=NEW,OLD=NEW…", by UUIDs or indices. OLD's index is that of gpuckpt.json,
// NEW's is nvidia-smi's on this node.
const PairsAnnotation = "dev.gpuckpt.gpus"

var (
	// ErrPairs reports that granted GPUs cannot take the place of those of the checkpoint.
	ErrPairs = errors.New("the GPUs do not fit the checkpoint")
	// ErrMemory is an ErrPairs that may pass in a moment: others use too much of the memory.
	ErrMemory = fmt.Errorf("%w: too little free memory", ErrPairs)
)

// GPU is a GPU of a checkpoint, or one of this node.
type GPU struct {
	UUID   string // "GPU-…", as nvidia-smi -L prints it
	Name   string // "NVIDIA H200"
	Memory uint64 // whole, in bytes
	Index  int    // as nvidia-smi counts
	Minor  int    // N of /dev/nvidiaN; of this node's GPUs only
	// PCIBusID orders this node's GPUs, "0000:41:00.0".
	PCIBusID string
	// Free is how much of the memory nobody uses; 0 is unknown.
	Free uint64
	// Users are the processes that use the memory, in words for an error; empty if unknown.
	Users string
	// MIG reports that the GPU is partitioned, VGPU that it is a virtual one.
	MIG, VGPU bool
}

// String names the GPU in an error.
func (g GPU) String() string { return fmt.Sprintf("%s (%s)", g.UUID, g.Name) }

// Requirement is what a checkpoint needs, or a suspended container.
type Requirement struct {
	// GPUs are the GPUs of the checkpoint.
	GPUs []GPU
	// Processes are the CUDA processes of the checkpoint.
	Processes []ProcessUse
}

// ProcessUse is the GPU state of one process.
type ProcessUse struct {
	GPUs  []string // UUIDs, among Requirement.GPUs
	Bytes uint64   // on all of these GPUs together, as far as it is known
}

// Pair is one GPU of a checkpoint and the GPU that takes its place.
type Pair struct {
	Old, New GPU
}

// Pairs finds a GPU among granted for each GPU of a checkpoint: of the same model, whole, with
// enough free memory, and each for one only. What decided says, in the form of PairsAnnotation,
// comes first. Then a GPU that is still there keeps its place. The others are taken in order, the
// checkpoint's by index, this node's by bus id. The pairs are in the order of the checkpoint's
// indices. The error is ErrPairs.
func Pairs(need Requirement, granted []GPU, decided string) ([]Pair, error) {
	olds := slices.SortedStableFunc(slices.Values(need.GPUs), func(a, b GPU) int { return cmp.Compare(a.Index, b.Index) })
	news := slices.SortedStableFunc(slices.Values(granted), func(a, b GPU) int {
		return cmp.Or(cmp.Compare(a.PCIBusID, b.PCIBusID), cmp.Compare(a.Index, b.Index), cmp.Compare(a.UUID, b.UUID))
	})
	state := map[string]uint64{} // of all processes that use a single GPU, by its UUID
	for _, p := range need.Processes {
		if len(p.GPUs) == 1 {
			state[p.GPUs[0]] += p.Bytes
		}
	}
	given, err := parsePairs(decided, olds, news)
	if err != nil {
		return nil, err
	}
	if len(news) < len(olds) {
		return nil, fmt.Errorf("%w: it was made on %s; here the container is granted %s", ErrPairs, list(olds), list(news))
	}
	reserved := slices.Collect(maps.Values(given)) // decided for one of olds
	m := matching{
		olds: olds, news: news, taken: map[int]int{},
		fits: func(o, n int) error {
			if to, ok := given[o]; ok && to != n || !ok && slices.Contains(reserved, n) {
				return errDecided
			}
			return fits(olds[o], news[n], state[olds[o].UUID])
		},
	}
	if err := m.run(); err != nil {
		return nil, err
	}
	pairs := make([]Pair, len(olds))
	for n, o := range m.taken {
		pairs[o] = Pair{Old: olds[o], New: news[n]}
	}
	return pairs, together(need, pairs)
}

// errDecided is why a GPU that would fit is not free to take.
var errDecided = errors.New("decided otherwise")

// memoryPatience is how long PairWhenFree waits for memory that is in use.
const memoryPatience = 3 * time.Second

// PairWhenFree calls Pairs with the GPUs that look returns. If Pairs refuses them, it looks again
// at once, since the first look may be of old, and for up to 3 s as long as only memory is missing:
// a driver may free it some time after a process has ended.
func PairWhenFree(ctx context.Context, need Requirement, decided string, look func(context.Context) ([]GPU, error)) ([]Pair, error) {
	var refusal error
	patience := time.Now().Add(memoryPatience)
	for looks := 1; ; looks++ {
		granted, err := look(ctx)
		if err != nil && refusal != nil {
			return nil, fmt.Errorf("%w; %w", refusal, err)
		}
		if err != nil {
			return nil, err
		}
		pairs, err := Pairs(need, granted, decided)
		if refusal = err; err == nil {
			return pairs, nil
		}
		if looks == 1 {
			continue
		}
		if !errors.Is(refusal, ErrMemory) || time.Now().After(patience) {
			return nil, refusal
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// Subsets returns the sets of pairs to offer to the driver for one process, for which it accepts
// only the GPUs that it counts as the process's. Each of uuids names GPUs of the checkpoint; nil
// names all. Empty sets and repetitions are left out.
func Subsets(pairs []Pair, uuids ...[]string) (sets [][]Pair) {
	for _, names := range uuids {
		var set []Pair
		for _, p := range pairs {
			if names == nil || slices.Contains(names, p.Old.UUID) {
				set = append(set, p)
			}
		}
		if len(set) > 0 && !slices.ContainsFunc(sets, func(have []Pair) bool { return slices.Equal(have, set) }) {
			sets = append(sets, set)
		}
	}
	return sets
}

// IsIdentity reports whether every GPU keeps its place.
func IsIdentity(pairs []Pair) bool {
	return !slices.ContainsFunc(pairs, func(p Pair) bool { return p.Old.UUID != p.New.UUID })
}

// fits returns why a GPU cannot take the place of another with so many bytes of state, or nil.
func fits(old, now GPU, state uint64) error {
	switch {
	case now.MIG:
		return fmt.Errorf("%w: %v is partitioned (MIG), and NVIDIA's driver restores to whole GPUs only: nvidia-smi -i %d -mig 0", ErrPairs, now, now.Index)
	case now.VGPU:
		return fmt.Errorf("%w: %v is a virtual GPU (vGPU), and NVIDIA's driver restores to physical ones only", ErrPairs, now)
	case now.Name != old.Name:
		return fmt.Errorf("%w: %v of the checkpoint and %v here are of different models", ErrPairs, old, now)
	case now.Memory < state:
		return fmt.Errorf("%w: %v has %s of memory, the state of %s is %s", ErrPairs, now, size(now.Memory), old.UUID, size(state))
	case now.Free > 0 && now.Free < state:
		return fmt.Errorf("%w: GPU %d, %v, has %s of memory free, and the state of %s needs %s; end what uses the memory (%s), or choose another GPU",
			ErrMemory, now.Index, now, size(now.Free), old.UUID, size(state), cmp.Or(now.Users, "nvidia-smi shows it"))
	}
	return nil
}

func size(bytes uint64) string { return units.BytesSize(float64(bytes)) }

// together checks the processes that use several GPUs, on each of which they have an unknown part.
func together(need Requirement, pairs []Pair) error {
	for _, p := range need.Processes {
		if len(p.GPUs) < 2 {
			continue
		}
		var free uint64
		known := true
		for _, pair := range pairs {
			if slices.Contains(p.GPUs, pair.Old.UUID) {
				free += pair.New.Free
				known = known && pair.New.Free > 0
			}
		}
		if known && free < p.Bytes {
			return fmt.Errorf("%w: a process has %s on %d GPUs, and those it is to go to have %s free; end what uses them (nvidia-smi shows it), or choose others",
				ErrMemory, size(p.Bytes), len(p.GPUs), size(free))
		}
	}
	return nil
}

// matching assigns to each GPU of olds a GPU of news that fits.
type matching struct {
	olds, news []GPU
	taken      map[int]int // by index in news: which of olds has it
	fits       func(o, n int) error
}

// run first places the GPUs that are still there. Each other gets the first GPU that is free; one
// that is placed moves only if there is no other way (augmenting paths).
func (m *matching) run() error {
	var rest []int
	for o, old := range m.olds {
		n := slices.IndexFunc(m.news, func(g GPU) bool { return g.UUID == old.UUID })
		if n < 0 || m.fits(o, n) != nil {
			rest = append(rest, o)
			continue
		}
		m.taken[n] = o
	}
	for _, o := range rest {
		if !m.place(o, map[int]bool{}) {
			return m.why(o)
		}
	}
	return nil
}

func (m *matching) place(o int, seen map[int]bool) bool {
	for _, mayMove := range []bool{false, true} {
		for n := range m.news {
			owner, taken := m.taken[n]
			if seen[n] || taken != mayMove || m.fits(o, n) != nil {
				continue
			}
			seen[n] = true
			if !taken || m.place(owner, seen) {
				m.taken[n] = o
				return true
			}
		}
	}
	return false
}

// why returns the error for one of olds that has no place, with the reason for each of news.
func (m *matching) why(o int) error {
	var reasons []string
	kind, busy := ErrMemory, false
	for n := range m.news {
		err := m.fits(o, n)
		if err == nil {
			busy = true
			continue
		}
		if !errors.Is(err, ErrMemory) {
			kind = ErrPairs
		}
		if errors.Is(err, ErrPairs) { // not errDecided
			reasons = append(reasons, strings.TrimPrefix(strings.TrimPrefix(err.Error(), ErrMemory.Error()+": "), ErrPairs.Error()+": "))
		}
	}
	if busy || len(reasons) == 0 {
		kind = ErrPairs
		reasons = append(reasons, fmt.Sprintf("it was made on %s; here the container is granted %s", list(m.olds), list(m.news)))
	}
	return fmt.Errorf("%w: nothing can take the place of %v: %s", kind, m.olds[o], strings.Join(reasons, "; "))
}

// parsePairs reads the annotation: which of news each of olds gets, by their places in these lists.
func parsePairs(annotation string, olds, news []GPU) (map[int]int, error) {
	given := map[int]int{}
	if strings.TrimSpace(annotation) == "" {
		return given, nil
	}
	refuse := func(form string, args ...any) error {
		return fmt.Errorf("%w: annotation %s: %s", ErrPairs, PairsAnnotation, fmt.Sprintf(form, args...))
	}
	used := map[int]bool{}
	for field := range strings.SplitSeq(annotation, ",") {
		from, to, ok := strings.Cut(strings.TrimSpace(field), "=")
		if !ok {
			return nil, refuse("%q is not OLD=NEW", field)
		}
		o, n := find(olds, from), find(news, to)
		switch _, again := given[o]; {
		case o < 0:
			return nil, refuse("%q is no GPU of the checkpoint; it was made on %s", from, list(olds))
		case n < 0:
			return nil, refuse("%q is no GPU that the container is granted here: %s", to, list(news))
		case again || used[n]:
			return nil, refuse("%q names a GPU a second time", field)
		}
		given[o], used[n] = n, true
	}
	return given, nil
}

// find returns the place of a GPU by UUID or index; -1 if it is not there.
func find(gpus []GPU, name string) int {
	name = strings.TrimSpace(name)
	index, err := strconv.Atoi(name)
	return slices.IndexFunc(gpus, func(g GPU) bool {
		return strings.EqualFold(g.UUID, name) || err == nil && g.Index == index
	})
}

// list returns "2 GPUs: GPU-… (NVIDIA H200), GPU-… (NVIDIA H200)".
func list(gpus []GPU) string {
	if len(gpus) == 0 {
		return "none"
	}
	var names []string
	for _, g := range gpus {
		names = append(names, g.String())
	}
	return fmt.Sprintf("%d GPU%s: %s", len(gpus), strings.Repeat("s", min(len(gpus)-1, 1)), strings.Join(names, ", "))
}
