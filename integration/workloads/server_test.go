// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package workloads

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	ctdimages "github.com/containerd/containerd/v2/core/images"
	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// server is a container of a program that answers over HTTP.
type server struct {
	*harness.Container
	port int
}

// said is what the server answers for a session: words, how many there have been, and a digest of
// the last logits.
type said struct {
	Words  []int
	Place  int
	Logits string
}

// state is a number over weights and KV cache, which one bit changes, and how far each session is.
type state struct {
	Checksum string
	Places   []int
}

// serve starts a server with a KV cache of that size, and does not wait for it.
func serve(t *testing.T, id string, gib int) server {
	t.Helper()
	return serveBy(t, id, "server.py", "--cache-gib", strconv.Itoa(gib))
}

// serveBy starts a server by one of the programs, and does not wait for it.
func serveBy(t *testing.T, id, program string, args ...string) server {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	k := start(t, true, harness.RunSpec{ID: id}, program, append([]string{"--port", strconv.Itoa(port)}, args...)...)
	return server{k, port}
}

// needsTransformers skips a test where a server of Hugging Face's models cannot run.
func needsTransformers(t *testing.T) {
	t.Helper()
	needsPyTorch(t)
	for _, module := range []string{"transformers", "aiohttp", "uvloop"} {
		needsModule(t, module)
	}
}

// ready waits until the server listens.
func (s server) ready(ctx context.Context, t *testing.T) {
	t.Helper()
	await(ctx, t, s.Container, "the server is ready", func() bool { return strings.Contains(s.Logs(), "\nready\n") })
}

// ask asks the server; while nothing listens, it tries again until the context ends. Each
// question has a connection of its own.
func (s server) ask(ctx context.Context, question string, answer any) error {
	return s.request(ctx, http.MethodGet, question, nil, answer)
}

// request is ask, by a method and with a body.
func (s server) request(ctx context.Context, method, question string, body []byte, answer any) error {
	one := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 2 * time.Minute}
	for {
		request, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("http://127.0.0.1:%d/%s", s.port, question), bytes.NewReader(body))
		if err != nil {
			return err
		}
		response, err := one.Do(request)
		if errors.Is(err, syscall.ECONNREFUSED) && ctx.Err() == nil {
			time.Sleep(2 * time.Millisecond)
			continue
		}
		if err != nil {
			return err
		}
		data, err := io.ReadAll(response.Body)
		if err = errors.Join(err, response.Body.Close()); err != nil {
			return err
		}
		if response.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s: %s", question, response.Status, data)
		}
		return json.Unmarshal(data, answer)
	}
}

// next has a session say its next words.
func (s server) next(ctx context.Context, t *testing.T, session, words int) (answer said) {
	t.Helper()
	if err := s.ask(ctx, fmt.Sprintf("next?session=%d&words=%d", session, words), &answer); err != nil {
		t.Fatalf("%v; it wrote:\n%s", err, tail(s.Logs()))
	}
	return answer
}

// sum asks for the server's state.
func (s server) sum(ctx context.Context, t *testing.T) (answer state) {
	t.Helper()
	if err := s.ask(ctx, "checksum", &answer); err != nil {
		t.Fatalf("%v; it wrote:\n%s", err, tail(s.Logs()))
	}
	return answer
}

// load is clients that ask a server, each in a session of its own, one word at a time.
type load struct {
	stop    context.CancelFunc
	done    sync.WaitGroup
	mu      sync.Mutex
	words   [][]int // of each session
	last    []said
	errs    []error
	longest time.Duration
}

// startLoad lets that many clients ask.
func startLoad(ctx context.Context, s server, clients int) *load {
	l := &load{words: make([][]int, clients), last: make([]said, clients)}
	until, stop := context.WithCancel(ctx)
	l.stop = stop
	for session := range clients {
		l.done.Go(func() {
			for until.Err() == nil {
				var answer said
				began := time.Now()
				err := s.ask(ctx, fmt.Sprintf("next?session=%d", session), &answer) // its last one is answered
				l.mu.Lock()
				if err != nil {
					l.errs = append(l.errs, err)
					l.mu.Unlock()
					return
				}
				l.words[session] = append(l.words[session], answer.Words...)
				l.last[session] = answer
				l.longest = max(l.longest, time.Since(began))
				l.mu.Unlock()
			}
		})
	}
	return l
}

// requests returns how many were answered, and the first error.
func (l *load) requests() (n int, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, words := range l.words {
		n += len(words)
	}
	return n, errors.Join(l.errs...)
}

// more waits until the clients have had that many more answers.
func (l *load) more(ctx context.Context, t *testing.T, want int) {
	t.Helper()
	before, _ := l.requests()
	for {
		n, err := l.requests()
		if err != nil {
			t.Fatalf("after %d answers: %v", n, err)
		}
		if n >= before+want {
			return
		}
		if ctx.Err() != nil {
			t.Fatalf("%d answers, want %d", n, before+want)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// A server under load is checkpointed and runs on, is suspended and resumed, and no request fails.
// Then it is checkpointed, killed and restored three times. What each session says is what a server
// says that nobody interrupted.
func TestServer(t *testing.T) {
	result := results.Add(t)
	needsPyTorch(t)
	t.Parallel()
	takeRoom(t, 38, 44)
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	const clients = 4
	whole, s := serve(t, harness.Name(t)+"-whole", 1), serve(t, harness.Name(t), 1)
	s.ready(ctx, t)
	clientele := startLoad(ctx, s, clients)
	clientele.more(ctx, t, 100)

	ref := "checkpoint.test/" + harness.Name(t) + ":running"
	var made harness.CheckpointAnswer
	if err := result.Time("checkpoint --leave-running", func() error {
		return shared.Gpuckpt(ctx, &made, "checkpoint", s.ID, "--image", ref, "--leave-running")
	}); err != nil {
		t.Fatalf("%v\n%s", err, tail(linesWith(shared.Log(), s.ID)))
	}
	result.Number("paused_seconds", made.PausedSeconds)
	result.Number("gpu_bytes", float64(made.GPUBytes))
	clientele.more(ctx, t, 100)
	for _, command := range []string{"suspend", "resume"} {
		if err := result.Time(command, func() error {
			_, err := shared.Output(ctx, "gpuckpt", command, "--address", shared.Address(), "--namespace", shared.Namespace(), s.ID)
			return err
		}); err != nil {
			t.Fatalf("%v\n%s", err, tail(linesWith(shared.Log(), s.ID)))
		}
	}
	clientele.more(ctx, t, 100)
	clientele.stop()
	clientele.done.Wait()
	n, err := clientele.requests()
	if err != nil {
		t.Fatalf("%d requests, of which failed: %v", n, err)
	}
	result.Number("requests_count", float64(n))
	result.Number("longest_request_seconds", clientele.longest.Seconds())
	if err := shared.Client().ImageService().Delete(ctx, ref, ctdimages.SynchronousDelete()); err != nil {
		t.Error(err)
	}

	words, last := clientele.words, clientele.last
	memory := memoryDir(t)
	for round := range rounds {
		dir := filepath.Join(memory, strconv.Itoa(round))
		before := s.sum(ctx, t)
		if err := result.Time("checkpoint", func() error { checkpointInto(ctx, t, result, s.Container, dir); return nil }); err != nil {
			t.Fatal(err)
		}
		result.Phases(t, s.Container)
		result.Number("image_bytes", float64(bytesIn(t, dir)))
		endTask(ctx, t, s.Container)
		if err := result.Time("restore", func() error { restoreFrom(ctx, t, s.Container, dir); return nil }); err != nil {
			t.Fatal(err)
		}
		result.Phases(t, s.Container)
		if after := s.sum(ctx, t); !reflect.DeepEqual(after, before) {
			t.Fatalf("restore %d has the state %v, before it was %v", round+1, after, before)
		}
		for session := range clients {
			last[session] = s.next(ctx, t, session, 10)
			words[session] = append(words[session], last[session].Words...)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
		result.Number("rounds_count", float64(round+1))
	}
	for session := range clients {
		want := whole.next(ctx, t, session, len(words[session]))
		if !slices.Equal(words[session], want.Words) || last[session].Place != want.Place || last[session].Logits != want.Logits {
			t.Errorf("session %d said %d words, the last with logits %s; a server that nobody interrupted says others, the last with logits %s",
				session, len(words[session]), last[session].Logits, want.Logits)
		}
	}
	t.Logf("%d requests, the longest took %v", n, clientele.longest)
}

// A server is restored from files that lie on the node, or from a registry. What counts is how long its users
// wait: from the begin of the restore to the first answer. Our own server has 76 GiB, most of it KV cache that is
// still zero; that of Hugging Face's transformers has the 15 GiB of its weights.
func TestFirstAnswer(t *testing.T) {
	for _, test := range []struct {
		name      string
		begin     func(t *testing.T, id, dir string) server
		needs     func(*testing.T)
		dir       func(*testing.T) string
		runs      int
		gpu, host int64 // room, in GiB
	}{
		{"tmpfs", serveWithMuchCache, needsPyTorch, memoryDir, 3, 80, 100},
		{"disk", serveWithMuchCache, needsPyTorch, diskDir, 2, 80, 100},
		{"transformers-tmpfs", serveTransformers, needsTransformers, memoryDir, 3, 20, 44},
		{"transformers-disk", serveTransformers, needsTransformers, diskDir, 3, 20, 44},
	} {
		t.Run(test.name, func(t *testing.T) {
			result := results.Add(t)
			test.needs(t)
			takeRoom(t, test.gpu, test.host)
			dir := test.dir(t)
			firstAnswer(t, result, func() server { return test.begin(t, harness.Name(t), dir) }, dir, test.runs)
		})
	}
	for _, test := range []struct {
		name  string
		begin func(t *testing.T, id string) server
		needs func(*testing.T)
	}{
		{"registry", func(t *testing.T, id string) server { return serve(t, id, 2) }, needsPyTorch},
		{"transformers-registry", func(t *testing.T, id string) server { return serveTransformers(t, id, "") }, needsTransformers},
	} {
		t.Run(test.name, func(t *testing.T) {
			result := results.Add(t)
			test.needs(t)
			takeRoom(t, 20, 75) // an image in the registry's tmpfs, its blobs and its layers in containerd's
			firstAnswerFromRegistry(t, result, func() server { return test.begin(t, harness.Name(t)) })
		})
	}
}

func diskDir(t *testing.T) string { return harness.DiskDir(t) }

// serveWithMuchCache starts a server with as much KV cache as the GPU has room for, and a directory in its checkpoint.
func serveWithMuchCache(t *testing.T, id, dir string) server {
	t.Helper()
	cache := min(60, roomIn(t, dir), int(gpu.Devices[0].Memory>>30)-22)
	if cache < 1 {
		t.Skipf("the GPU has %d GiB less than a server takes", 1-cache)
	}
	t.Logf("%d GiB of KV cache", cache)
	return serve(t, id, cache)
}

// serveTransformers starts a server of Hugging Face's, whose checkpoint goes to a directory, if any.
func serveTransformers(t *testing.T, id, dir string) server {
	t.Helper()
	if dir != "" {
		roomIn(t, dir)
	}
	return serveBy(t, id, "transformers_server.py")
}

// roomIn returns how many GiB a directory has room for beside the weights of a model of 8B shape; without one the
// test is skipped. A checkpoint asks for as much room as there is GPU memory, zeros included.
func roomIn(t *testing.T, dir string) int {
	t.Helper()
	var disk unix.Statfs_t
	if err := unix.Statfs(dir, &disk); err != nil {
		t.Fatal(err)
	}
	room := int(disk.Bavail*uint64(disk.Bsize)>>30) - 20
	if room < 1 {
		t.Skipf("%s has %d GiB less than a server takes", dir, 1-room)
	}
	return room
}

// beginCold starts a server, notes how long it takes until it has said a word, and has it say some more. It returns
// the server and its state.
func beginCold(ctx context.Context, t *testing.T, result *harness.TestResult, begin func() server) (server, state) {
	t.Helper()
	began := time.Now()
	s := begin()
	s.ready(ctx, t)
	s.next(ctx, t, 0, 1)
	result.Number("cold_answer_seconds", time.Since(began).Seconds())
	s.next(ctx, t, 0, 19)
	return s, s.sum(ctx, t)
}

// firstAnswer checkpoints a server into a directory and restores it some times.
func firstAnswer(t *testing.T, result *harness.TestResult, begin func() server, parent string, runs int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	s, before := beginCold(ctx, t, result, begin)
	dir := filepath.Join(parent, "server")
	var gpu uint64
	if err := result.Time("checkpoint", func() error { gpu = checkpointInto(ctx, t, result, s.Container, dir); return nil }); err != nil {
		t.Fatal(err)
	}
	result.Phases(t, s.Container)
	result.Number("gpu_bytes", float64(gpu))
	result.Number("image_bytes", float64(bytesIn(t, dir)))
	var restored, answered []float64
	var answers []said
	for range runs {
		endTask(ctx, t, s.Container)
		if err := harness.ForgetCache(dir); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		restoreFrom(ctx, t, s.Container, dir)
		restored = append(restored, time.Since(began).Seconds())
		answers = append(answers, s.next(ctx, t, 0, 1))
		answered = append(answered, time.Since(began).Seconds())
		result.Phases(t, s.Container)
	}
	t.Logf("seconds until restored %.2f, until the first answer %.2f", restored, answered)
	slices.Sort(restored)
	slices.Sort(answered)
	result.Number("restored_seconds", restored[runs/2])
	result.Number("first_answer_seconds", answered[runs/2])
	for _, answer := range answers {
		if answer.Place != before.Places[0]+1 || !reflect.DeepEqual(answer, answers[0]) {
			t.Errorf("after the restores the first answers are %v; the session was at %d", answers, before.Places[0])
		}
	}
	// All else is as it was: one more restore, and the sum before any answer.
	endTask(ctx, t, s.Container)
	restoreFrom(ctx, t, s.Container, dir)
	if after := s.sum(ctx, t); !reflect.DeepEqual(after, before) {
		t.Fatalf("the state is %v, before it was %v", after, before)
	}
}
