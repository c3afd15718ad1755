// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/integration/beside"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

const (
	// envServers names the servers to run beside runc's shim, with commas; "all" runs all.
	envServers = "GPUCKPT_TEST_SERVERS"
	// envLog names the file to which results are added.
	envLog = "GPUCKPT_TEST_SERVERS_LOG"
	// rounds is how often each goes there and back on each way, in a row.
	rounds = 3
	// gpuPort is where the program beside a server answers.
	gpuPort = "10000"
)

// sample is what `make test` runs: a lock on a file, a database that is mapped and locked, a server in Go with
// streams of its clients, sessions of a terminal's kind with processes that changed their user.
const sample = "cron,etcd,openssh-server,slapd"

// options are what runc's shim needs to be told.
var options = []string{"tcp-established", "file-locks", "link-remap"}

var (
	session *harness.Session
	shared  *harness.Containerd
)

func TestMain(m *testing.M) {
	harness.Main(m.Run, func(s *harness.Session) (err error) {
		session = s
		shared, err = s.Start(harness.Options{})
		return err
	})
}

// What passes with runc's shim passes here.
func TestServers(t *testing.T) {
	log, err := beside.OpenLog(os.Getenv(envLog), session.Results.Commit)
	if err != nil {
		t.Fatal(err)
	}
	names := strings.Split(sample, ",")
	chosen := os.Getenv(envServers)
	if chosen != "" {
		names = strings.Split(chosen, ",")
	}
	for _, name := range names {
		if name != "all" && !slices.ContainsFunc(Table, func(s Server) bool { return s.Name == name }) {
			t.Errorf("there is no server %q", name)
		}
	}
	for _, server := range Table {
		if chosen != "all" && !slices.Contains(names, server.Name) {
			continue
		}
		t.Run(server.Name, func(t *testing.T) {
			t.Parallel()
			result, has := log.Has(server.Name)
			if !has {
				result = beside.Result{Test: server.Name, Commit: session.Results.Commit}
				try(t, server, chosen != "", &result)
				if err := log.Add(result); err != nil {
					t.Fatal(err)
				}
			}
			if err := result.Judge(Exceptions); err != nil {
				t.Error(err)
			}
		})
	}
}

// try takes a server there and back: the sample beside a GPU, which is the way with the most in it, all others
// on each way.
func try(t *testing.T, server Server, whole bool, result *beside.Result) {
	image := importRoot(t, server)
	result.Ours = make(map[string]*beside.Outcome)
	if !whole {
		result.Ours[beside.GPU] = there(t, server, image, harness.Runtime, beside.GPU, 1)
		return
	}
	result.Runc = make(map[string]*beside.Outcome)
	for _, way := range beside.Ways {
		result.Runc[way] = there(t, server, image, harness.RuncRuntime, way, rounds)
		result.Ours[way] = there(t, server, image, harness.Runtime, way, rounds)
	}
	result.Ours[beside.GPU] = there(t, server, image, harness.Runtime, beside.GPU, rounds)
}

// importRoot makes the image of a server, which goes with the test.
func importRoot(t *testing.T, server Server) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "../../hack/server-root", strings.Fields(server.Packages)...)
	var log strings.Builder
	cmd.Stderr = &log
	archive, err := cmd.Output()
	if err != nil {
		t.Fatalf("hack/server-root: %v\n%s", err, log.String())
	}
	img, err := harness.ImageOfRoot(strings.TrimSpace(string(archive)))
	if err != nil {
		t.Fatal(err)
	}
	name := "gpuckpt.test/" + id(server) + ":1"
	if err := shared.Import(t.Context(), name, img); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := shared.Ctr(session.Context(), "images", "rm", "--sync", name); err != nil {
			t.Error(err)
		}
	})
	return name
}

// id is the server's name for containers.
func id(s Server) string { return strings.ReplaceAll(s.Name, " ", "-") }

// there takes a server there and back.
func there(t *testing.T, server Server, image, runtime, way string, rounds int) *beside.Outcome {
	t.Helper()
	spec := harness.RunSpec{ID: id(server), Runtime: runtime, Image: image}
	gpuwork := ""
	if way == beside.GPU {
		program, err := session.Bins.Path("gpuwork")
		if err != nil {
			t.Fatal(err)
		}
		spec.GPUs = []int{0}
		spec.Mounts = []specs.Mount{{Type: "bind", Source: program, Destination: "/usr/bin/gpuwork", Options: []string{"rbind", "ro"}}}
		gpuwork = "gpuwork counter --port " + gpuPort + " &\n"
	}
	spec.Args = []string{"bash", "-c", server.Script(gpuwork)}
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Minute)
	defer cancel()
	r, err := beside.New(ctx, shared, session.Bins, way, spec, options)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.End(); err != nil {
			t.Error(err)
		}
	}()
	ask := func(script string) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
		defer cancel()
		out, err := r.Container.Exec(ctx, "bash", "-c", script)
		if err != nil {
			return errors.New(strings.TrimSpace(out) + ": " + err.Error()[max(0, len(err.Error())-300):] + "\nits output: " + r.Container.Logs())
		}
		return nil
	}
	verdict := func(round int) error {
		question := server.Question(round + 1)
		if way == beside.GPU {
			question = fmt.Sprintf("counted=$(gpuwork send 127.0.0.1:%s count)\n[ \"$counted\" = %d ] || { echo \"the GPU counts '$counted', not %[2]d\"; exit 1; }\n", gpuPort, 101+round) + question
		}
		return ask(question)
	}
	err = r.Start()
	if err == nil {
		err = ask(server.Waiting())
	}
	if err == nil {
		err = verdict(0)
	}
	if err != nil {
		t.Errorf("%s, %s: the row is wrong: it does not start: %v", runtime, way, err)
		return &beside.Outcome{Failed: "start", Error: r.Short(err)}
	}
	outcome, err := r.ThereAndBack(rounds, verdict)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s, %s: %+v", runtime, way, *outcome)
	return outcome
}
