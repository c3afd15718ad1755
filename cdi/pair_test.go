// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cdi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

const gib = 1 << 30

// gpuN is the nth GPU of a machine: an H200 with all of its memory free.
func gpuN(n int, change ...func(*GPU)) GPU {
	g := GPU{
		UUID: fmt.Sprintf("GPU-%08d-0000-0000-0000-000000000000", n), Name: "NVIDIA H200", Memory: 141 * gib, Free: 140 * gib,
		Index: n, Minor: n, PCIBusID: fmt.Sprintf("0000:%02X:00.0", 16+n),
	}
	for _, c := range change {
		c(&g)
	}
	return g
}

func gpuList(ns ...int) []GPU {
	var gpus []GPU
	for _, n := range ns {
		gpus = append(gpus, gpuN(n))
	}
	return gpus
}

func model(name string) func(*GPU) { return func(g *GPU) { g.Name = name } }
func free(bytes uint64) func(*GPU) { return func(g *GPU) { g.Free = bytes } }

// uses is a process with so much on these GPUs.
func uses(bytes uint64, ns ...int) ProcessUse {
	u := ProcessUse{Bytes: bytes}
	for _, n := range ns {
		u.GPUs = append(u.GPUs, gpuN(n).UUID)
	}
	return u
}

// short writes pairs as "0=1,1=0", by the numbers of gpuN.
func short(pairs []Pair) string {
	number := func(g GPU) string { return strings.TrimLeft(g.UUID[4:11], "0") + g.UUID[11:12] }
	var words []string
	for _, p := range pairs {
		words = append(words, number(p.Old)+"="+number(p.New))
	}
	return strings.Join(words, ",")
}

func TestPairs(t *testing.T) {
	a100 := model("NVIDIA A100")
	for _, test := range []struct {
		name       string
		demand     Requirement
		granted    []GPU
		annotation string
		want       string
	}{
		{"the same GPU", Requirement{GPUs: gpuList(0)}, gpuList(0), "", "0=0"},
		{"another", Requirement{GPUs: gpuList(0)}, gpuList(3), "", "0=3"},
		{"the same among several", Requirement{GPUs: gpuList(2)}, gpuList(0, 1, 2, 3), "", "2=2"},
		{"the first of several others", Requirement{GPUs: gpuList(7)}, gpuList(3, 1, 2), "", "7=1"},
		{"in order", Requirement{GPUs: gpuList(0, 1)}, gpuList(5, 4), "", "0=4,1=5"},
		{"in order of the checkpoint's indices", Requirement{GPUs: gpuList(1, 0)}, gpuList(4, 5), "", "0=4,1=5"},
		{"one stays, the other moves", Requirement{GPUs: gpuList(0, 1)}, gpuList(1, 2), "", "0=2,1=1"},
		{"by bus, not by the driver's order", Requirement{GPUs: gpuList(0)}, []GPU{
			gpuN(3, func(g *GPU) { g.Index, g.PCIBusID = 0, "0000:F0:00.0" }), gpuN(4, func(g *GPU) { g.Index, g.PCIBusID = 1, "0000:0F:00.0" }),
		}, "", "0=4"},
		{"models", Requirement{GPUs: []GPU{gpuN(0), gpuN(1, a100)}}, []GPU{gpuN(4, a100), gpuN(5)}, "", "0=5,1=4"},
		{"moved out of the way", Requirement{GPUs: gpuList(0, 1), Processes: []ProcessUse{uses(1*gib, 0), uses(100*gib, 1)}},
			[]GPU{gpuN(4), gpuN(5, free(2*gib))}, "", "0=5,1=4"},
		{"even from its own place", Requirement{GPUs: gpuList(0, 1), Processes: []ProcessUse{uses(1*gib, 0), uses(100*gib, 1)}},
			[]GPU{gpuN(0), gpuN(5, free(2*gib))}, "", "0=5,1=0"},
		{"no GPU", Requirement{}, gpuList(0, 1), "", ""},
		{"annotation by UUID", Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1), gpuN(0).UUID + "=" + gpuN(1).UUID + ", " + gpuN(1).UUID + "=" + gpuN(0).UUID, "0=1,1=0"},
		{"annotation by index", Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1), "1=0,0=1", "0=1,1=0"},
		{"annotation of one", Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1, 2), "0=1", "0=1,1=0"},
		{"annotation in capitals", Requirement{GPUs: gpuList(0)}, gpuList(0, 1), strings.ToUpper(gpuN(0).UUID) + "=1", "0=1"},
		{"memory that is not known", Requirement{GPUs: gpuList(0), Processes: []ProcessUse{uses(100*gib, 0)}}, []GPU{gpuN(1, free(0))}, "", "0=1"},
		{"a process on two", Requirement{GPUs: gpuList(0, 1), Processes: []ProcessUse{uses(200*gib, 0, 1)}}, gpuList(0, 1), "", "0=0,1=1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			for range 3 { // always the same
				pairs, err := Pairs(test.demand, slices.Clone(test.granted), test.annotation)
				if err != nil {
					t.Fatal(err)
				}
				if got := short(pairs); got != test.want {
					t.Errorf("pairs %s, want %s", got, test.want)
				}
			}
		})
	}
}

func TestPairsRefused(t *testing.T) {
	one := Requirement{GPUs: gpuList(0), Processes: []ProcessUse{uses(20*gib, 0)}}
	for _, test := range []struct {
		name       string
		demand     Requirement
		granted    []GPU
		annotation string
		memory     bool // ErrMemory
		words      []string
	}{
		{"none", one, nil, "", false, []string{gpuN(0).UUID, "NVIDIA H200", "granted none"}},
		{"too few", Requirement{GPUs: gpuList(0, 1)}, gpuList(1), "", false, []string{"2 GPUs", "granted 1 GPU: " + gpuN(1).UUID}},
		{"another model", one, []GPU{gpuN(1, model("NVIDIA H100"))}, "", false, []string{"different models", "NVIDIA H100", "NVIDIA H200"}},
		{"too little memory", one, []GPU{gpuN(1, func(g *GPU) { g.Memory, g.Free = 10*gib, 10*gib })}, "", false, []string{"has 10GiB of memory", "is 20GiB"}},
		{"too little free", one, []GPU{gpuN(1, free(3*gib))}, "", true, []string{"3GiB of memory free", "20GiB", "nvidia-smi"}},
		{"each for its own reason", one, []GPU{gpuN(1, free(3*gib)), gpuN(2, model("NVIDIA L4"))}, "", false, []string{"3GiB of memory free", "NVIDIA L4"}},
		{"free for one of two", Requirement{GPUs: gpuList(0, 1), Processes: []ProcessUse{uses(20*gib, 0), uses(20*gib, 1)}},
			[]GPU{gpuN(0), gpuN(1, free(1*gib))}, "", false, []string{"nothing can take the place of " + gpuN(1).UUID, "1GiB of memory free"}},
		{"two processes together", Requirement{GPUs: gpuList(0), Processes: []ProcessUse{uses(20*gib, 0), uses(20*gib, 0)}}, []GPU{gpuN(0, free(30*gib))}, "", true, []string{"40GiB"}},
		{"a process on two", Requirement{GPUs: gpuList(0, 1), Processes: []ProcessUse{uses(200*gib, 0, 1)}}, []GPU{gpuN(0), gpuN(1, free(1*gib))}, "", true, []string{"200GiB on 2 GPUs", "141GiB free"}},
		{"MIG", one, []GPU{gpuN(1, func(g *GPU) { g.MIG = true })}, "", false, []string{"MIG", "nvidia-smi -i 1 -mig 0"}},
		{"vGPU", one, []GPU{gpuN(1, func(g *GPU) { g.VGPU = true })}, "", false, []string{"vGPU"}},
		{"annotation: no pair", one, gpuList(0), "0", false, []string{PairsAnnotation, `"0" is not OLD=NEW`}},
		{"annotation: unknown old", one, gpuList(0), "1=0", false, []string{`"1" is no GPU of the checkpoint`, gpuN(0).UUID}},
		{"annotation: unknown new", one, gpuList(0), "0=GPU-x", false, []string{`"GPU-x" is no GPU that the container is granted here`}},
		{"annotation: old twice", Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1), "0=1,0=0", false, []string{"a second time"}},
		{"annotation: new twice", Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1), "0=1,1=1", false, []string{"a second time"}},
		{"annotation: that does not fit", one, []GPU{gpuN(0), gpuN(1, model("NVIDIA L4"))}, "0=1", false, []string{"different models", "NVIDIA L4"}},
		{"annotation: takes another's only place", Requirement{GPUs: []GPU{gpuN(0), gpuN(1, model("NVIDIA L4"))}},
			[]GPU{gpuN(4, model("NVIDIA L4")), gpuN(5)}, "0=5,1=5", false, []string{"a second time"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Pairs(test.demand, test.granted, test.annotation)
			if !errors.Is(err, ErrPairs) || errors.Is(err, ErrMemory) != test.memory {
				t.Fatalf("error %v, want an ErrPairs, ErrMemory: %v", err, test.memory)
			}
			for _, word := range test.words {
				if !strings.Contains(err.Error(), word) {
					t.Errorf("the error does not say %q: %v", word, err)
				}
			}
			t.Log(err)
		})
	}
}

func TestPairWhenFree(t *testing.T) {
	need := Requirement{GPUs: gpuList(0), Processes: []ProcessUse{uses(20*gib, 0)}}
	busy, other, gone := gpuN(0, free(1*gib)), gpuN(0, model("NVIDIA L4")), errors.New("gone")
	for _, test := range []struct {
		name  string
		looks []GPU // what each look finds; none is an error
		want  error
	}{
		{"at once", []GPU{gpuN(0)}, nil},
		{"the first look was of old", []GPU{other, gpuN(0)}, nil},
		{"memory comes free", []GPU{busy, busy, busy, gpuN(0)}, nil},
		{"nothing that passes", []GPU{busy, other}, ErrPairs},
		{"no look", nil, gone},
		{"no look after a refusal", []GPU{busy}, ErrMemory},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := 0
			pairs, err := PairWhenFree(t.Context(), need, "", func(context.Context) ([]GPU, error) {
				if n == len(test.looks) {
					return nil, gone
				}
				n++
				return test.looks[n-1 : n], nil
			})
			if !errors.Is(err, test.want) || (err == nil) != (len(pairs) == 1) || n != len(test.looks) {
				t.Errorf("after %d looks: %v, %v", n, pairs, err)
			}
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := PairWhenFree(ctx, need, "", func(context.Context) ([]GPU, error) { return []GPU{busy}, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestSubsets(t *testing.T) {
	pairs, err := Pairs(Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1), "0=1,1=0")
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, set := range Subsets(pairs, nil, []string{gpuN(1).UUID}, []string{}, []string{gpuN(1).UUID, gpuN(0).UUID}) {
		got = append(got, short(set))
	}
	if want := []string{"0=1,1=0", "1=0"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Whatever the annotation says, the pairs are a bijection over the checkpoint's
// GPUs, or it is refused.
func FuzzPairs(f *testing.F) {
	f.Add("0=1,1=0")
	f.Add(gpuN(0).UUID + "=" + gpuN(2).UUID)
	f.Add("0=0,,")
	f.Fuzz(func(t *testing.T, annotation string) {
		pairs, err := Pairs(Requirement{GPUs: gpuList(0, 1)}, gpuList(0, 1, 2), annotation)
		if err != nil {
			if !errors.Is(err, ErrPairs) {
				t.Fatal(err)
			}
			return
		}
		if len(pairs) != 2 || pairs[0].Old.UUID == pairs[1].Old.UUID || pairs[0].New.UUID == pairs[1].New.UUID || pairs[0].New.UUID == "" || pairs[1].New.UUID == "" {
			t.Errorf("%q: %+v", annotation, pairs)
		}
	})
}
