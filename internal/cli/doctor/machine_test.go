// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"maps"
	"strings"
	"testing"
)

// A containerd that is too old is found, whatever a distribution calls it.
func TestTooOld(t *testing.T) {
	for number, want := range map[string]bool{"1.7.24~ds1": true, "1.6.20~ds1": true, "1.7.28-0ubuntu1~24.04.1": true, "2.1.4": true, "2.2.9": false, "2.10.0": false, "2.4.2+unknown": false, "": false, "dev": false} {
		if got := tooOld(number); got != want {
			t.Errorf("%q: %v", number, got)
		}
	}
}

func TestCheckKernel(t *testing.T) {
	base := map[string]string{
		"/proc/sys/kernel/osrelease": "6.1.2\n",
		"/proc/self/status":          "Name:\tx\nCapEff:\t000001ffffffffff\n",
	}
	with := func(more map[string]string) map[string]string {
		all := maps.Clone(base)
		maps.Copy(all, more)
		return all
	}
	for _, test := range []struct {
		name  string
		files map[string]string
		wants []want
	}{
		{"good", base, []want{{"kernel", "version", OK, []string{"6.1.2"}}, {"kernel", "rights", OK, nil}}},
		{"ptrace is off", with(map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "3\n"}), []want{{"kernel", "ptrace", Failure, []string{"reboot"}}}},
		{"ptrace is restricted", with(map[string]string{"/proc/sys/kernel/yama/ptrace_scope": "1\n"}), []want{{"kernel", "ptrace", OK, nil}}},
		{"not root", with(map[string]string{"/proc/self/status": "CapEff:\t0000000000000000\n"}),
			[]want{{"kernel", "rights", Failure, []string{"CAP_NET_ADMIN, CAP_SYS_ADMIN, CAP_SYS_PTRACE", "sudo gpuckpt doctor"}}}},
	} {
		t.Run(test.name, func(t *testing.T) { compare(t, CheckKernel(fake(t, test.files)), test.wants) })
	}
}

// mountsOf words /proc/self/mountinfo of mounts "POINT TYPE OPTIONS".
func mountsOf(mounts ...string) string {
	var b strings.Builder
	b.WriteString("1 0 8:1 / / rw - ext4 /dev/sda1 rw\n")
	for _, m := range mounts {
		f := strings.Fields(m)
		b.WriteString("2 1 0:2 / " + f[0] + " rw - " + f[1] + " none rw," + f[2] + "\n")
	}
	return b.String()
}

func TestCheckCgroup(t *testing.T) {
	for _, test := range []struct {
		name  string
		files map[string]string
		wants []want
	}{
		{"2", map[string]string{"/proc/self/mountinfo": mountsOf("/sys/fs/cgroup cgroup2 nsdelegate"), "/sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n"},
			[]want{{"cgroup", "version", OK, []string{"2"}}, {"cgroup", "memory", OK, nil}}},
		{"2 without memory", map[string]string{"/proc/self/mountinfo": mountsOf("/sys/fs/cgroup cgroup2 nsdelegate"), "/sys/fs/cgroup/cgroup.controllers": "cpu pids\n"},
			[]want{{"cgroup", "memory", Warning, []string{"cgroup_enable=memory"}}}},
		{"1", map[string]string{"/proc/self/mountinfo": mountsOf("/sys/fs/cgroup tmpfs mode=755", "/sys/fs/cgroup/freezer cgroup freezer", "/sys/fs/cgroup/memory cgroup memory", "/sys/fs/cgroup/unified cgroup2 x")},
			[]want{{"cgroup", "version", OK, []string{"1"}}, {"cgroup", "freezer", OK, nil}, {"cgroup", "memory", OK, nil}}},
		{"1 without freezer", map[string]string{"/proc/self/mountinfo": mountsOf("/sys/fs/cgroup/cpu cgroup cpu,cpuacct")},
			[]want{{"cgroup", "freezer", Failure, []string{"mount -t cgroup -o freezer"}}, {"cgroup", "memory", Warning, nil}}},
		{"none", map[string]string{"/proc/self/mountinfo": mountsOf()}, []want{{"cgroup", "version", Failure, []string{"mount -t cgroup2"}}}},
		{"no proc", nil, []want{{"cgroup", "version", Failure, nil}}},
	} {
		t.Run(test.name, func(t *testing.T) { compare(t, CheckCgroup(fake(t, test.files)), test.wants) })
	}
}

func TestCheckMemory(t *testing.T) {
	good := map[string]string{
		"/proc/meminfo": "MemTotal: 2048 kB\nMemAvailable:    1048576 kB\n", shmemHuge: "always within_size [advise] never deny force\n",
		"/proc/self/mountinfo": mountsOf("/shm tmpfs size=1g,huge=advise", "/small tmpfs size=1g"), "/tmp/x": "", "/shm/x": "", "/small/x": "",
	}
	for _, test := range []struct {
		name  string
		env   string
		files map[string]string
		wants []want
	}{
		{"disk", "X=", nil, []want{{"memory", "free", OK, []string{"1GiB"}}, {"memory", "images meanwhile", OK, []string{"/tmp, on a disk"}}}},
		{"tmpfs", "TMPDIR=/shm", nil, []want{{"memory", "images meanwhile", OK, []string{"/shm, on tmpfs"}}}},
		{"no directory", "TMPDIR=/none", nil, []want{{"memory", "images meanwhile", Failure, []string{"TMPDIR"}}}},
		{"no huge pages", "X=", map[string]string{shmemHuge: "always within_size advise never [deny] force\n"}, []want{{"memory", "huge pages", Warning, []string{"echo never >/sys/"}}}},
		{"a kernel without huge pages", "X=", map[string]string{shmemHuge: ""}, []want{{"memory", "huge pages", Warning, []string{"CONFIG_TRANSPARENT_HUGEPAGE=y"}}}},
		{"huge pages of the shim's own", "X=", map[string]string{shmemHuge: "always within_size advise [never] deny force\n"}, []want{{"memory", "huge pages", OK, nil}}},
		{"meminfo garbled", "X=", map[string]string{"/proc/meminfo": "MemAvailable: x kB\n"}, []want{{"memory", "free", Warning, nil}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			files := maps.Clone(good)
			maps.Copy(files, test.files)
			n := fake(t, files)
			n.Env = []string{test.env}
			checks, free := CheckMemory(n, "/tmp")
			compare(t, checks, append(test.wants, want{"memory", "images", OK, []string{"/tmp, "}}))
			if (free == 1<<30) != (test.name != "meminfo garbled") {
				t.Errorf("%d bytes are free", free)
			}
		})
	}
}

func TestCheckCRIU(t *testing.T) {
	run := map[string]string{"/proc/self/mountinfo": mountsOf("/run tmpfs mode=755")}
	const version = "[ \"$1\" = --version ] && { echo Version: 4.2.1; exit; }\n"
	for _, test := range []struct {
		name, script string
		files        map[string]string
		wants        []want
	}{
		{"good", version + "exit 0\n", run, []want{{"criu", "program", OK, []string{"4.2.1"}}, {"criu", "network lock", OK, []string{"nftables"}}}},
		{"old", "[ \"$1\" = --version ] && echo Version: 3.17.1\nexit 0\n", run, []want{{"criu", "program", Failure, []string{"3.17.1", "4.2"}}}},
		{"garbled", "echo hello\n", run, []want{{"criu", "program", Failure, []string{"does not run"}}}},
		{"broken", "echo 'libnet.so.9: not found' >&2; exit 127\n", run, []want{{"criu", "program", Failure, []string{"libnet.so.9: not found"}}}},
		{"kernel fails", version + "echo 'Error (criu/cr-check.c:1): no ptrace' >&2; exit 1\n", run,
			[]want{{"criu", "check", Failure, []string{"no ptrace", "check -v4"}}, {"criu", "network lock", Warning, []string{"iptables"}}}},
		{"features missing", version + "[ \"$2\" = --all ] && { echo 'Warn  (criu/cr-check.c:824): Dirty tracking is OFF.' >&2; exit 1; }\nexit 0\n", run,
			[]want{{"criu", "check", OK, []string{"Dirty tracking is OFF."}}}},
		{"run on a disk", version + "exit 0\n", map[string]string{"/proc/self/mountinfo": mountsOf()}, []want{{"criu", "cache", Warning, []string{"tmpfs /run"}}}},
		{"none", "", run, []want{{"criu", "program", Failure, []string{"none in containerd's $PATH", "apt-get"}}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := fake(t, test.files)
			if test.script != "" {
				n.program(t, "criu", test.script)
			}
			compare(t, CheckCRIU(t.Context(), n), test.wants)
		})
	}
	n := fake(t, run)
	n.CRIU = n.program(t, "criu", version+"exit 0\n")
	n.Env = []string{"PATH=", "CRIU_LIBS_DIR=/libs"}
	put(t, n.path("/libs/cuda_plugin.so"), "", 0o644)
	compare(t, CheckCRIU(t.Context(), n), []want{{"criu", "program", OK, []string{n.CRIU}}, {"criu", "CUDA plugin", OK, []string{"/libs/cuda_plugin.so"}}})
}

func TestCheckRunc(t *testing.T) {
	for _, test := range []struct {
		name, script string
		status       Status
		words        []string
	}{
		{"good", "echo runc version 1.5.2; [ $1 = features ] && exit 1; exit 0", Warning, []string{"1.5.2"}},
		{"able", `[ $1 = features ] && { echo '{"ociVersionMin":"1.0.0","annotations":{"org.opencontainers.runc.checkpoint.enabled":"true"}}'; exit; }; echo runc version 1.5.2`, OK, []string{"version 1.5.2"}},
		{"unable", `[ $1 = features ] && { echo '{"annotations":{"org.opencontainers.runc.checkpoint.enabled":"false"}}'; exit; }; echo runc version 1.5.2`, Failure, []string{"without checkpoints"}},
		{"broken", "echo no >&2; exit 1", Failure, []string{"does not run: no"}},
		{"none", "", Failure, []string{"none in containerd's $PATH"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := fake(t, nil)
			if test.script != "" {
				n.program(t, "runc", test.script)
			}
			compare(t, CheckRunc(t.Context(), n), []want{{"runc", "program", test.status, test.words}})
		})
	}
}

func TestCheckCDI(t *testing.T) {
	const spec = `{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[
		{"name":"0","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0"}]}},{"name":"all","containerEdits":{"deviceNodes":[{"path":"/dev/nvidia0"}]}}],
		"containerEdits":{"mounts":[{"hostPath":"/lib/libcuda.so.580.1","containerPath":"/lib/libcuda.so.580.1"}]}}`
	for _, test := range []struct {
		name  string
		files map[string]string
		wants []want
	}{
		{"good", map[string]string{"/etc/cdi/nvidia.json": spec, "/dev/nvidia0": "", "/lib/libcuda.so.580.1": ""}, []want{{"cdi", "GPUs", OK, []string{"nvidia.com/gpu=0, all"}}}},
		{"of another driver", map[string]string{"/var/run/cdi/nvidia.json": spec, "/dev/nvidia0": ""}, []want{{"cdi", "GPUs", Failure, []string{"/lib/libcuda.so.580.1", "nvidia-ctk cdi generate"}}}},
		{"none", nil, []want{{"cdi", "GPUs", Warning, []string{"nvidia-ctk cdi generate"}}}},
		{"another kind", map[string]string{"/etc/cdi/x.json": strings.ReplaceAll(spec, "nvidia.com/gpu", "example.com/x")}, []want{{"cdi", "GPUs", Warning, nil}}},
	} {
		t.Run(test.name, func(t *testing.T) { compare(t, CheckCDI(fake(t, test.files), nil), test.wants) })
	}
	n := fake(t, map[string]string{"/etc/cdi/bad.json": "{"})
	checks := CheckCDI(n, []string{"/etc/cdi"})
	compare(t, checks, []want{{"cdi", "GPUs", Warning, nil}, {"cdi", n.path("/etc/cdi/bad.json"), Warning, []string{"ignored"}}})
}

func TestConfigFlag(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"containerd", ""},
		{"containerd --config /a.toml", "/a.toml"},
		{"containerd --config=/a.toml --address x", "/a.toml"},
		{"containerd -c /a.toml", "/a.toml"},
		{"containerd -config /a.toml", "/a.toml"},
		{"containerd --config", ""},
		{"containerd --address config /x", ""},
	} {
		if got := configFlag(strings.Fields(test.args)); got != test.want {
			t.Errorf("%q: got %q, want %q", test.args, got, test.want)
		}
	}
}
