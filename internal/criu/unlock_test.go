// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/gpuckpt/gpuckpt/internal/node/host"
)

// iptablesLock is what CRIU 4.2 gives to iptables-restore (net.c, iptables_network_lock_internal).
const iptablesLock = "*filter\n:CRIU - [0:0]\n-I INPUT -j CRIU\n-I OUTPUT -j CRIU\n" +
	"-A CRIU -m mark --mark 0xC114 -j ACCEPT\n-A CRIU -j DROP\nCOMMIT\n"

// A network that a CRIU which was killed has locked is unlocked, once or twice, and one that is not locked stays.
func TestUnlock(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to make a network")
	}
	cmd := exec.Command("sleep", "600")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	pid, dir := cmd.Process.Pid, t.TempDir()
	in := func(t *testing.T, do func() error) {
		t.Helper()
		if err := host.InNetwork(fmt.Sprintf("/proc/%d/ns/net", pid), do); err != nil {
			t.Fatal(err)
		}
	}
	unlock := func(t *testing.T, want bool) {
		t.Helper()
		if removed, err := Unlock(t.Context(), Shim{}, dir, pid); err != nil || removed != want {
			t.Errorf("removed %v, want %v, error %v", removed, want, err)
		}
	}
	unlock(t, false) // CRIU has not been there
	told := func(t *testing.T, text string) {
		t.Helper()
		for name, text := range map[string]string{"config.json": "{}", SettingsName: text} {
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
	t.Run("iptables", func(t *testing.T) {
		for _, name := range []string{"iptables-restore", "ip6tables-restore"} {
			if _, err := exec.LookPath(name); err != nil {
				t.Skip(err)
			}
		}
		told(t, "tcp-established\n")
		unlock(t, false)
		for dumps := range 3 {
			in(t, func() error {
				for range dumps {
					for _, name := range []string{"iptables-restore", "ip6tables-restore"} {
						lock := exec.Command(name, "-w", "--noflush")
						lock.Stdin = strings.NewReader(iptablesLock)
						if out, err := lock.CombinedOutput(); err != nil {
							return fmt.Errorf("%s: %w: %s", name, err, out)
						}
					}
				}
				return nil
			})
			unlock(t, dumps > 0)
			in(t, func() error {
				for _, name := range []string{"iptables", "ip6tables"} {
					if out, err := exec.Command(name, "-w", "-S").CombinedOutput(); err != nil || strings.Contains(string(out), "CRIU") {
						t.Errorf("after %d dumps %s has %s, error %v", dumps, name, out, err)
					}
				}
				return nil
			})
		}
		unlock(t, false)
	})
	t.Run("nftables", func(t *testing.T) {
		told(t, "network-lock nftables\n")
		var s host.Netlink
		in(t, func() (err error) {
			s, err = host.OpenNetlink(unix.NETLINK_NETFILTER, 0)
			return err
		})
		defer s.Close()
		const tables = unix.NFNL_SUBSYS_NFTABLES << 8
		for _, name := range []string{"CRIU-1b4e28ba-2fa1-11d2-883f-0016d3cca427", "CRIU-7", "another"} {
			batch := netfilterMessage(unix.NFNL_MSG_BATCH_BEGIN, 0, "")
			batch = append(batch, netfilterMessage(tables|unix.NFT_MSG_NEWTABLE, unix.NLM_F_ACK|unix.NLM_F_CREATE, name)...)
			batch = append(batch, netfilterMessage(unix.NFNL_MSG_BATCH_END, 0, "")...)
			if err := s.Ask(batch, func([]byte) {}); err != nil {
				t.Skipf("the kernel has no nftables: %v", err)
			}
		}
		unlock(t, true)
		unlock(t, false)
		var left []string
		if err := s.Ask(netfilterMessage(tables|unix.NFT_MSG_GETTABLE, unix.NLM_F_DUMP, ""), func(table []byte) {
			left = append(left, tableName(table))
		}); err != nil || len(left) != 1 || left[0] != "another" {
			t.Errorf("left are %q, error %v", left, err)
		}
	})
	told(t, "network-lock skip\n")
	unlock(t, false)
}
