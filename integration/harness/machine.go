// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

// ownDirectories are the directories that a machine has of its own, by their names in the instance's
// directory. Short ones: they have sockets.
var ownDirectories = map[string]string{
	"etc": "/etc", "u": "/usr/local", "l": "/var/lib", "log": "/var/log", "state": containerdRun, "run": "/run/gpuckpt",
}

// machineScript makes the mounts of a machine, says so, and stays. What is mounted later is seen by all
// that runs there, and nowhere else.
const machineScript = `
home=$1; shift
if [ -d /usr/local/nvidia ]; then # a driver
	mkdir -p "$home/u/nvidia"
	mount --rbind /usr/local/nvidia "$home/u/nvidia"
fi
for pair; do
	mkdir -p "${pair#*=}"
	mount --rbind "$home/${pair%%=*}" "${pair#*=}"
done
mount --make-rshared /
echo
exec sleep infinity >/dev/null`

// startMachine gives the instance what a machine of its own has: a network, and directories of its own
// at the places where a node's are, so that programs which know no other places find what is theirs. A
// containerd's socket, state and configuration are at their places. The rest of the machine is
// everybody's.
func (c *Containerd) startMachine() error {
	args := []string{"--mount", "--net", "sh", "-ec", machineScript, "sh", c.home.dir}
	for name, place := range ownDirectories {
		if err := os.MkdirAll(filepath.Join(c.home.dir, name), 0o755); err != nil {
			return fmt.Errorf("make a machine: %w", err)
		}
		args = append(args, name+"="+place)
	}
	if out, err := exec.Command("cp", "-a", "/etc/.", c.InMachine("/etc")).CombinedOutput(); err != nil {
		return fmt.Errorf("make a machine: %w: %s", err, out)
	}
	config := c.InMachine("/etc/containerd/config.toml")
	err := errors.Join(
		os.RemoveAll(c.InMachine("/etc/gpuckpt")), os.RemoveAll(c.InMachine("/etc/cdi")), os.RemoveAll(filepath.Dir(config)), os.MkdirAll(filepath.Dir(config), 0o755),
		os.MkdirAll(c.InMachine("/usr/local/bin"), 0o755),
		os.Symlink(config, c.home.config()), os.Symlink(c.home.socket(), c.InMachine(containerdRun+"/containerd.sock")),
	)
	if err != nil {
		return fmt.Errorf("make a machine: %w", err)
	}
	cmd := exec.Command("unshare", args...)
	cmd.Env, cmd.Stderr = c.daemonEnv(), os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil {
		_, err = bufio.NewReader(out).ReadString('\n')
	}
	if err != nil {
		return fmt.Errorf("make a machine: %w", err)
	}
	c.machine = cmd
	return nil
}

// MachinePid is a process of the machine that Options.Machine has made, whose namespaces are the machine's.
func (c *Containerd) MachinePid() int { return c.machine.Process.Pid }

// InMachine is where a file of the machine is for everybody else; below one of the directories that it
// has of its own.
func (c *Containerd) InMachine(path string) string {
	for name, place := range ownDirectories {
		if !c.opts.Machine {
			break
		}
		if rest, err := filepath.Rel(place, path); err == nil && filepath.IsLocal(rest) {
			return filepath.Join(c.home.dir, name, rest)
		}
	}
	return path
}

// enter has a command run in the machine, if there is one.
func (c *Containerd) enter(cmd *exec.Cmd) {
	if c.machine == nil {
		return
	}
	cmd.Args = append([]string{"nsenter", "--target", strconv.Itoa(c.MachinePid()), "--mount", "--net", "--", cmd.Path}, cmd.Args[1:]...)
	cmd.Path, cmd.Err = "/usr/bin/nsenter", nil
	if path, err := exec.LookPath("nsenter"); err == nil {
		cmd.Path = path
	}
}

// MachineCommand is Command for a program that is to run in the machine.
func (c *Containerd) MachineCommand(cmd *exec.Cmd) *exec.Cmd {
	c.enter(cmd)
	return cmd
}

// stopMachine ends what keeps the machine's namespaces when nothing else is in them.
func (c *Containerd) stopMachine() {
	if c.machine != nil {
		_ = c.machine.Process.Kill()
		_ = c.machine.Wait()
	}
}
