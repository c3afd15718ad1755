// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// prompted is what a server of continuous batching says: the words that follow a prompt.
type prompted struct{ Words []int }

const (
	wordsOf = 32 // how many words each request asks for
	prompts = 32 // how many there are, each with an answer of its own
)

// prompt asks for the words that follow a prompt, which follows from the seed.
func (s server) prompt(ctx context.Context, seed int) ([]int, error) {
	var answer prompted
	err := s.ask(ctx, fmt.Sprintf("generate?seed=%d&words=%d", seed, wordsOf), &answer)
	return answer.Words, err
}

// crowd is clients that keep asking a server for what follows some prompts, and compare it with what they know.
type crowd struct {
	stop     context.CancelFunc
	done     sync.WaitGroup
	mu       sync.Mutex
	answered int
	lost     int     // whose connection was closed before the answer
	wrong    []error // other answers, and all that is neither an answer nor a closed connection
	longest  time.Duration
	// longestLost is how long it took at most until a client saw that its request was lost.
	longestLost time.Duration
}

// closed reports whether an error says that the connection was closed before an answer.
func closed(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// startCrowd lets that many clients ask in turns. What they call asks the question of that number, and fails if the
// answer is wrong.
func startCrowd(ctx context.Context, clients int, ask func(ctx context.Context, question int) error) *crowd {
	c := new(crowd)
	until, stop := context.WithCancel(ctx)
	c.stop = stop
	for client := range clients {
		c.done.Go(func() {
			for question := client; until.Err() == nil; question = (question + clients) % prompts {
				began := time.Now()
				err := ask(ctx, question) // its last one is answered
				c.mu.Lock()
				switch {
				case closed(err):
					c.lost++
					c.longestLost = max(c.longestLost, time.Since(began))
				case err != nil:
					c.wrong = append(c.wrong, fmt.Errorf("prompt %d: %w", question, err))
					stop()
				default:
					c.answered++
					c.longest = max(c.longest, time.Since(began))
				}
				c.mu.Unlock()
			}
		})
	}
	return c
}

// more waits until the clients have had that many more answers. It fails if one of all they had was wrong.
func (c *crowd) more(ctx context.Context, t *testing.T, want int) {
	t.Helper()
	for until := -1; ; time.Sleep(5 * time.Millisecond) {
		c.mu.Lock()
		n, lost, err := c.answered, c.lost, errors.Join(c.wrong...)
		c.mu.Unlock()
		if until < 0 {
			until = n + want
		}
		switch {
		case err != nil:
			t.Fatalf("after %d answers and %d lost connections: %v", n, lost, err)
		case n >= until:
			return
		case ctx.Err() != nil:
			t.Fatalf("%d answers and %d lost connections, want %d answers", n, lost, until)
		}
	}
}

// connectionsLost returns how many requests lost their connection.
func (c *crowd) connectionsLost() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lost
}

// Hugging Face's continuous batching, as underLoad has it. Each answer that arrives is the one that the server gave
// before it was disturbed, to the same prompt alone.
func TestBatching(t *testing.T) {
	result := results.Add(t)
	needsTransformers(t)
	t.Parallel()
	takeRoom(t, 14, 50)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	s := serveBy(t, harness.Name(t), "batching_server.py")
	s.ready(ctx, t)
	var want [][]int
	for seed := range prompts {
		words, err := s.prompt(ctx, seed)
		if err != nil {
			t.Fatalf("%v; it wrote:\n%s", err, tail(s.Logs()))
		}
		if len(words) != wordsOf {
			t.Fatalf("prompt %d: %d words, want %d", seed, len(words), wordsOf)
		}
		if slices.ContainsFunc(want, func(other []int) bool { return slices.Equal(other, words) }) {
			t.Fatalf("prompt %d has an answer that another one has: a mix-up would not show", seed)
		}
		want = append(want, words)
	}
	underLoad(ctx, t, result, s, func(ctx context.Context, seed int) error {
		words, err := s.prompt(ctx, seed)
		if err == nil && !slices.Equal(words, want[seed]) {
			err = fmt.Errorf("%v, want %v", words, want[seed])
		}
		return err
	})
}

// underLoad checkpoints a server while eight clients ask it, and it runs on: no request fails. Then it is checkpointed,
// killed and restored three times with requests in flight, which lose their connections. No answer is wrong.
func underLoad(ctx context.Context, t *testing.T, result *harness.TestResult, s server, ask func(ctx context.Context, question int) error) {
	t.Helper()
	const clients, some = 8, 64
	clientele := startCrowd(ctx, clients, ask)
	t.Cleanup(func() { clientele.stop(); clientele.done.Wait() })
	clientele.more(ctx, t, some)
	ref := "checkpoint.test/" + harness.Name(t) + ":running"
	forgetAtEnd(t, ref)
	var made harness.CheckpointAnswer
	if err := result.Time("checkpoint --leave-running", func() error {
		return untilTaken(ctx, t, result, func() error {
			return shared.Gpuckpt(ctx, &made, "checkpoint", s.ID, "--image", ref, "--leave-running")
		})
	}); err != nil {
		t.Fatalf("%v\n%s", err, tail(linesWith(shared.Log(), s.ID)))
	}
	result.Number("paused_seconds", made.PausedSeconds)
	result.Number("gpu_bytes", float64(made.GPUBytes))
	clientele.more(ctx, t, some)
	if lost := clientele.connectionsLost(); lost > 0 {
		t.Errorf("%d requests lost their connection to a server that ran on", lost)
	}
	forgetImage(ctx, t, ref)

	memory := memoryDir(t)
	var first []float64 // seconds from the begin of a restore to the first answer
	for round := range rounds {
		lost := clientele.connectionsLost()
		dir := filepath.Join(memory, strconv.Itoa(round))
		if err := result.Time("checkpoint", func() error { checkpointInto(ctx, t, result, s.Container, dir); return nil }); err != nil {
			t.Fatal(err)
		}
		result.Phases(t, s.Container)
		result.Number("image_bytes", float64(bytesIn(t, dir)))
		endTask(ctx, t, s.Container)
		began := time.Now()
		if err := result.Time("restore", func() error { restoreFrom(ctx, t, s.Container, dir); return nil }); err != nil {
			t.Fatal(err)
		}
		clientele.more(ctx, t, 1)
		first = append(first, time.Since(began).Seconds())
		t.Logf("restored, its first answer came after %v", time.Since(began))
		result.Phases(t, s.Container)
		clientele.more(ctx, t, some)
		if n := clientele.connectionsLost() - lost; n < 1 || n > clients {
			t.Errorf("%d requests lost their connection in round %d, want those in flight: 1 to %d", n, round+1, clients)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		result.Number("rounds_count", float64(round+1))
	}
	clientele.stop()
	clientele.done.Wait()
	clientele.more(ctx, t, 0)
	slices.Sort(first)
	result.Number("first_answer_seconds", first[len(first)/2])
	result.Number("requests_answered_count", float64(clientele.answered))
	result.Number("requests_failed_count", float64(clientele.lost))
	result.Number("longest_request_seconds", clientele.longest.Seconds())
	result.Number("longest_failed_request_seconds", clientele.longestLost.Seconds())
	t.Logf("%d requests answered in at most %v, %d lost their connection, which took at most %v to see",
		clientele.answered, clientele.longest, clientele.lost, clientele.longestLost)
}
