// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"
)

// Of the kernel's log the records count that are the kernel's and of a CRIU.
func TestKernelLog(t *testing.T) {
	for _, test := range []struct {
		record, said string
		limit        bool
	}{
		{"6,1,2,-;criu[4711]: segfault at 0 ip 0 sp 0 error 6 in criu[400000+1000]\n SUBSYSTEM=x\n", "criu[4711]: segfault at 0 ip 0 sp 0 error 6 in criu[400000+1000]", false},
		{"6,1,2,-;traps: criu[4711] trap invalid opcode ip:0 sp:0 error:0 in criu[400000+1000]", "traps: criu[4711] trap invalid opcode ip:0 sp:0 error:0 in criu[400000+1000]", false},
		{"3,1,2,-;Memory cgroup out of memory: Killed process 4711 (criu) total-vm:8kB, anon-rss:4kB", "Memory cgroup out of memory: Killed process 4711 (criu) total-vm:8kB, anon-rss:4kB", true},
		{"3,1,2,-;Memory cgroup out of memory: Killed process 4711 (job) total-vm:8kB", "", false},
		{"6,1,2,-;job[4711]: segfault at 0 ip 0", "", false},
		{"14,1,2,-;criu[4711]: segfault at 0 ip 0", "", false}, // a program's
		{"6,1,2,-;" + strings.Repeat("criu[1] ", 1000), strings.Repeat("criu[1] ", 1000)[:quotedBytes], false},
		{"criu[1]", "", false},
		{"", "", false},
	} {
		if said, limit := ofCRIU(test.record); said != test.said || limit != test.limit {
			t.Errorf("%.100q says %q, %v", test.record, said, limit)
		}
	}
	if said, _ := kernelLog(-1).ofCRIU(); said != "" {
		t.Errorf("no log says %q", said)
	}
}

// crashing makes a program called criu that writes to address 0.
func crashing(t *testing.T) string {
	t.Helper()
	const at, header = 0x400000, 64 + 56
	code := []byte{0x31, 0xc0, 0x89, 0x00} // xor %eax,%eax; mov %eax,(%rax)
	size := uint64(header + len(code))
	var b bytes.Buffer
	for _, part := range []any{
		elf.Header64{
			Ident: [16]byte{0x7f, 'E', 'L', 'F', byte(elf.ELFCLASS64), byte(elf.ELFDATA2LSB), byte(elf.EV_CURRENT)}, Type: uint16(elf.ET_EXEC), Machine: uint16(elf.EM_X86_64), Version: 1,
			Entry: at + header, Phoff: 64, Ehsize: 64, Phentsize: 56, Phnum: 1,
		},
		elf.Prog64{Type: uint32(elf.PT_LOAD), Flags: uint32(elf.PF_R | elf.PF_X), Vaddr: at, Paddr: at, Filesz: size, Memsz: size, Align: 4096},
		code,
	} {
		if err := binary.Write(&b, binary.LittleEndian, part); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "criu")
	if err := os.WriteFile(path, b.Bytes(), 0o700); err != nil {
		t.Fatal(err)
	}
	return path
}

// A CRIU that has crashed is explained in the kernel's words, which runc does not have.
func TestCrashIsExplained(t *testing.T) {
	if text, err := os.ReadFile("/proc/sys/debug/exception-trace"); err != nil || strings.TrimSpace(string(text)) == "0" || runtime.GOARCH != "amd64" {
		t.Skipf("the kernel logs no crashes: %q, %v", text, err)
	}
	program, cut := crashing(t), errors.New("exit status 1: read unixpacket @->@: EOF path= /x.log")
	for try := 1; ; try++ { // the kernel logs ten crashes of the machine's in five seconds at the most
		w := StartWatch(t.Context(), "", true, 0)
		crash := exec.Command(program).Run()
		err := w.Stop(cut)
		if !errors.Is(err, cut) || crash == nil || !strings.Contains(crash.Error(), "segmentation fault") {
			t.Fatalf("%v, %v", crash, err)
		}
		if strings.Contains(err.Error(), "possibly out of memory") && try < 60 {
			time.Sleep(time.Second)
			continue
		}
		wantError(t, err, "CRIU was killed or has crashed, the kernel says \"criu[")
		wantError(t, err, "segfault at 0 ")
		wantError(t, err, "take another checkpoint")
		break
	}
}
