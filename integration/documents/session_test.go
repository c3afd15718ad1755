// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package documents

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gpuckpt/gpuckpt/docs/commands"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// before are commands that a document's lines need.
var before = map[string]string{
	"gpu-host.md": "ctr images push HOST/workload:1 " + harness.WorkloadImage + "\n",
	"suspend.md":  run,
	"images.md":   run + checkpoint + remove,
	"operate.md":  run + checkpoint + "ctr tasks checkpoint --image-path /var/lib/checkpoints/job job\n",
	"security.md": run + checkpoint + "ctr images tag example.com/job:1 registry.example.com/job:2\n" +
		"openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out release.key\nopenssl pkey -in release.key -pubout -out release.pub\n",
}

const (
	run        = "ctr run --detach --runtime io.containerd.gpuckpt.v2 --gpus 0 IMAGE job\n"
	checkpoint = "gpuckpt checkpoint job --image example.com/job:1 --leave-running\n"
	remove     = "ctr tasks delete --force job\nctr containers delete job\n"
)

// programs are what lines may run: what is tested, and what changes nothing of this machine's.
var programs = []string{"gpuckpt", "ctr", "nerdctl", "openssl", "mkdir", "install", "true"}

// needs are what single lines need beforehand.
var needs = map[string]string{
	"ctr tasks resume CONTAINER":              "ctr tasks pause job",
	"ctr tasks resume job":                    "gpuckpt suspend job",
	"gpuckpt cuda --action restore --pid PID": "gpuckpt cuda --action lock --pid PID\ngpuckpt cuda --action checkpoint --pid PID",
	"ctr run --detach --runtime io.containerd.gpuckpt.v2 --gpus 0 --annotation dev.gpuckpt.restore=true example.com/job:1 job": "true",
	// On another host there is neither the image nor the container. The container goes first: it
	// would keep the snapshots of layers, which a pull then leaves out.
	"gpuckpt image pull registry.example.com/job:2": "ctr tasks delete --force job\nctr containers delete job\nctr images rm --sync registry.example.com/job:2",
	"ctr images import job.tar":                     "ctr images rm --sync example.com/job:1",
}

// The documents' commands, as they are there, on this containerd, GPU and registry: each succeeds,
// and a program that was checkpointed or suspended counts on.
func TestSessions(t *testing.T) {
	// What containers ask for by CDI is what the harness gives to others.
	writeCDI := func() {
		if err := shared.WriteCDISpec(cdiDir); err != nil {
			t.Fatal(err)
		}
	}
	u := &user{host: serve(t), dir: t.TempDir(), disk: harness.DiskDir(t)}
	if gpu.Kind == harness.SoftwareGPU {
		u.driver = driverRoot(t)
	}
	var err error
	if u.port, err = harness.FreePort(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(u.dir, "nerdctl.toml"), []byte("cgroup_manager = \"cgroupfs\"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, s := range commands.Sessions {
		t.Run(s.Document, func(t *testing.T) {
			defer u.clean(t)
			writeCDI()
			for text := range strings.Lines(before[s.Document]) {
				u.do(t, strings.TrimSpace(text))
			}
			path := "../../docs/" + s.Document
			if s.Document == "README.md" {
				path = "../../README.md"
			}
			lines, err := commands.Of(path)
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range lines {
				if !s.Is(l) || slices.ContainsFunc(commands.Others, func(o commands.Elsewhere) bool { return o.Covers(l) }) {
					continue
				}
				for text := range strings.Lines(needs[l.Text]) {
					u.do(t, strings.TrimSpace(text))
				}
				u.do(t, l.Text)
				if strings.HasPrefix(l.Text, "gpuckpt cdi generate") {
					writeCDI() // that one has the driver's files and not the software GPU's settings
				}
			}
		})
	}
}

// user is who types the lines.
type user struct {
	host string // of the registry
	dir  string // where
	port int    // at which the container's counter is asked
	disk string // in the place of /var/spill
	// driver is where the software GPU's library is, as a driver's; "" for a real one.
	driver string
	// suspended is whether the container is.
	suspended bool
}

// do runs a line with what this machine has of its own: a registry, a GPU, a program to run, the
// host's network.
func (u *user) do(t *testing.T, text string) {
	t.Helper()
	if program, _, _ := strings.Cut(text, " "); !slices.Contains(programs, program) {
		t.Fatalf("%q is not run: %s is not among the programs that may run here", text, program)
	}
	suspends, resumes := strings.HasPrefix(text, "gpuckpt suspend "), strings.HasPrefix(text, "gpuckpt resume ")
	if suspends && u.suspended { // the lines are alternatives
		u.do(t, "gpuckpt resume job")
	}
	if resumes && !u.suspended {
		u.do(t, "gpuckpt suspend job")
	}
	line := text
	program := " gpuwork counter --port " + strconv.Itoa(u.port)
	restores := strings.Contains(line, " restore ") && !strings.HasPrefix(line, "gpuckpt cuda ") || strings.Contains(line, "restore=true") || strings.Contains(line, "start --checkpoint")
	starts := strings.HasPrefix(line, "ctr run ") || strings.HasPrefix(line, "nerdctl run ")
	switch {
	case strings.HasPrefix(line, "ctr run "):
		line = strings.Replace(line, "ctr run ", "ctr run --net-host ", 1)
		line = strings.TrimSuffix(line, " [COMMAND...]")
		if strings.HasSuffix(line, " …") {
			line = strings.TrimSuffix(line, "…") + "--detach --runtime io.containerd.gpuckpt.v2 --gpus 0 IMAGE job"
		}
		line += program
	case strings.HasPrefix(line, "nerdctl run "):
		line = strings.Replace(line, "nerdctl run ", "nerdctl run --net host ", 1)
		if !restores {
			line += strings.Replace(program, " gpuwork", "", 1) // the image has an entry point
		}
	case strings.HasPrefix(line, "gpuckpt cdi generate ") && u.driver != "":
		line += " --driver-root " + u.driver
	case strings.HasPrefix(line, "gpuckpt restore "):
		line += " --net-host"
	}
	pid := ""
	if strings.Contains(line, "PID") {
		n, err := shared.Adopt("job", u.port).Pid(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		pid = strconv.Itoa(n)
	}
	line = strings.NewReplacer("registry.example.com", u.host, "/var/spill", u.disk, "HOST", u.host, "pull IMAGE", "pull "+u.host+"/workload:1", "IMAGE", harness.WorkloadImage,
		"CONTAINER", "job", "PID", pid, ">NODE.pub", ">node.pub").Replace(line)
	t.Log(line)
	if strings.Contains(line, " --listen ") {
		u.untilServed(t, line)
		return
	}
	out, err := u.shell(t.Context(), line).CombinedOutput()
	// nerdctl lost a race that docs/troubleshooting.md tells of.
	for tries := 1; tries < 3 && err != nil && strings.HasPrefix(line, "nerdctl start --checkpoint ") && strings.Contains(string(out), "content digest"); tries++ {
		out, err = u.shell(t.Context(), line).CombinedOutput()
	}
	if doctor := strings.HasPrefix(line, "gpuckpt doctor"); err != nil && (!doctor || !strings.Contains(string(out), "failure")) {
		t.Fatalf("%s: %v\n%s\n%s", text, err, out, shared.LogTail(3000))
	}
	switch {
	case suspends:
		u.suspended = true
	case resumes, strings.HasPrefix(text, "ctr tasks resume"), starts, restores:
		u.suspended = false
		fresh := starts && !restores
		got, err := harness.Ask(t.Context(), "127.0.0.1:"+strconv.Itoa(u.port), "next")
		if err != nil {
			t.Fatalf("%s: %v\n%s", text, err, shared.LogTail(3000))
		}
		if (got == "101") != fresh {
			t.Fatalf("after %q the counter is %s", text, got)
		}
	}
}

// driverRoot makes a directory with the software GPU's library by the name that a driver's has.
func driverRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	if _, err := gpu.Below(root); err != nil {
		t.Fatal(err)
	}
	libraries, err := filepath.Glob(filepath.Join(root, "usr/lib/*/*.so.1"))
	if err != nil || len(libraries) == 0 {
		t.Fatal("the software GPU has no libraries", err)
	}
	for _, library := range libraries {
		if err := os.Link(library, strings.TrimSuffix(library, "1")+gpu.Driver); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func (u *user) shell(ctx context.Context, line string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "bash", "-o", "pipefail", "-c", line)
	cmd.Dir = u.dir
	cmd.Env = append([]string{
		"CONTAINERD_ADDRESS=" + shared.Address(), "CONTAINERD_NAMESPACE=" + shared.Namespace(), "CONTAINERD_SNAPSHOTTER=" + shared.Snapshotter(),
		"GPUCKPT_IMAGE_PATH=" + shared.Dumps(), "GPUCKPT_CONFIG=" + shared.ShimConfigPath(), "NERDCTL_TOML=" + filepath.Join(u.dir, "nerdctl.toml"),
		"PATH=" + bins.SearchPath(), "HOME=" + u.dir, "TMPDIR=" + u.dir,
	}, shared.HostEnv()...)
	cmd.WaitDelay = time.Minute
	return cmd
}

// untilServed runs a line that serves until it is ended, and ends it when it answers.
func (u *user) untilServed(t *testing.T, line string) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cmd := u.shell(ctx, "exec "+line)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cancel()
		_ = cmd.Wait() // it was ended
	}()
	port := regexp.MustCompile(`--listen \S*:(\d+)`).FindStringSubmatch(line)
	harness.Within(t, line, func() bool {
		c, err := net.Dial("tcp", "127.0.0.1:"+port[1])
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
}

// clean removes what the lines of a document left.
func (u *user) clean(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	containers, err := shared.Client().Containers(ctx)
	if err != nil {
		t.Error(err)
	}
	for _, k := range containers {
		if err := shared.Adopt(k.ID(), u.port).Remove(ctx); err != nil {
			t.Error(err)
		}
	}
	if err := shared.ForgetImages(ctx); err != nil {
		t.Error(err)
	}
	for _, dir := range apart {
		left, err := filepath.Glob(filepath.Join(dir, "*"))
		for _, path := range left {
			err = errors.Join(err, os.RemoveAll(path))
		}
		if err != nil {
			t.Error(err)
		}
	}
	u.suspended = false
}

// serve starts a registry, and returns where.
func serve(t *testing.T) string {
	t.Helper()
	port, err := harness.FreePort()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	host := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
	config := filepath.Join(dir, "config.yml")
	text := fmt.Sprintf("version: 0.1\nlog: {level: error, accesslog: {disabled: true}}\nstorage: {filesystem: {rootdirectory: %s}}\nhttp: {addr: '%s'}\n", dir, host)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	program, err := bins.Path("registry")
	if err != nil {
		t.Fatalf("%v; run hack/setup", err)
	}
	cmd := exec.Command(program, "serve", config)
	cmd.Env = []string{"PATH=" + bins.SearchPath(), "OTEL_TRACES_EXPORTER=none"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
	})
	harness.Within(t, "the registry answers", func() bool {
		c, err := net.Dial("tcp", host)
		if err != nil {
			return false
		}
		return c.Close() == nil
	})
	return host
}
