// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/pkg/oci"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/harness"
	"github.com/gpuckpt/gpuckpt/integration/workloads/programs"
)

// completion is what llama-server answers: words, and how likely it found each.
type completion struct {
	Tokens []int
	Likely []struct{ Logprob float64 } `json:"completion_probabilities"`
}

// complete asks llama-server for the words that follow a prompt, which follows from the seed.
func (s server) complete(ctx context.Context, seed int) (answer completion, err error) {
	prompt := []int{1}
	for place := range 47 {
		prompt = append(prompt, 300+(seed*911+place*(37+seed))%3000)
	}
	question, err := json.Marshal(map[string]any{
		"prompt": append(prompt, 1000+64*seed), "n_predict": wordsOf, "temperature": 0, "n_probs": 1,
		"ignore_eos": true, "return_tokens": true,
	})
	if err != nil {
		return answer, err
	}
	return answer, s.request(ctx, http.MethodPost, "completion", question, &answer)
}

// unlike returns in what an answer differs from another one to the same prompt. Sums in float16 depend on who else
// is in the batch.
func (c completion) unlike(want completion) error {
	if !slices.Equal(c.Tokens, want.Tokens) || len(c.Likely) != len(want.Likely) {
		return fmt.Errorf("%v with %d probabilities, want %v", c.Tokens, len(c.Likely), want.Tokens)
	}
	for i, word := range c.Likely {
		if off := math.Abs(word.Logprob - want.Likely[i].Logprob); !(off < closeEnough) {
			return fmt.Errorf("word %d has the logarithmic probability %v, want %v", i, word.Logprob, want.Likely[i].Logprob)
		}
	}
	return nil
}

// closeEnough is between what a batch changes and what another prompt with the same last word does.
const closeEnough = 0.05

// llama.cpp's server, where the machine has it, as its own guide starts it, with a model of Llama 3 8B's shape and fewer
// words: it sorts all of them for each word that it says. See underLoad.
func TestLlamaServer(t *testing.T) {
	result := results.Add(t)
	needsPython(t)
	program, err := exec.LookPath("llama-server")
	if err != nil {
		t.Skipf("no llama.cpp here: %v", err)
	}
	if gpu.Kind != harness.RealGPU {
		t.Skip("llama.cpp's CUDA needs a real GPU")
	}
	takeRoom(t, 22, 76)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	model := filepath.Join(memoryDir(t), "model.gguf")
	script, err := programs.Sources.Open("random_gguf.py")
	if err != nil {
		t.Fatal(err)
	}
	defer script.Close()
	writer := exec.CommandContext(ctx, host.Executable, "-", model)
	writer.Stdin = script
	if out, err := writer.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	var has []specs.Mount
	for _, dir := range []string{filepath.Dir(program), filepath.Dir(model)} {
		has = append(has, specs.Mount{Type: "bind", Source: dir, Destination: dir, Options: []string{"bind", "ro", "rprivate"}})
	}
	began := time.Now()
	k := start(t, true, harness.RunSpec{ID: harness.Name(t), Amend: []oci.SpecOpts{oci.WithMounts(has)}}, program,
		"--model", model, "--n-gpu-layers", "99", "--parallel", "8", "--ctx-size", "8192", "--port", strconv.Itoa(port))
	s := server{k, port}
	await(ctx, t, k, "the server is ready", func() bool { return s.ask(ctx, "health", new(any)) == nil })
	var want []completion
	for seed := range prompts {
		answer, err := s.complete(ctx, seed)
		if err != nil {
			t.Fatalf("%v; it wrote:\n%s", err, tail(k.Logs()))
		}
		if seed == 0 {
			result.Number("cold_answer_seconds", time.Since(began).Seconds())
			t.Logf("cold, its first answer came after %v", time.Since(began))
		}
		if len(answer.Tokens) != wordsOf || len(answer.Likely) != wordsOf {
			t.Fatalf("prompt %d: %d words, want %d", seed, len(answer.Tokens), wordsOf)
		}
		if slices.ContainsFunc(want, func(other completion) bool { return answer.unlike(other) == nil }) {
			t.Fatalf("prompt %d has an answer that another one has: a mix-up would not show", seed)
		}
		want = append(want, answer)
	}
	underLoad(ctx, t, result, s, func(ctx context.Context, seed int) error {
		answer, err := s.complete(ctx, seed)
		if err == nil {
			err = answer.unlike(want[seed])
		}
		return err
	})
}
