// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package config is what an operator and a user decide: the node's TOML file, and the annotations
// of a container, which come before it.
//
// An operation on a container (create and restore, pause, checkpoint, suspend) has one Source,
// which reads the file once, when somebody first asks. So an edit of the file needs no restart, and
// an operation never goes by halves of two files.
package config

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pelletier/go-toml/v2"
)

// Env names a file in place of Path, in containerd's environment, which its shims inherit.
const Env = "GPUCKPT_CONFIG"

// Path is the node's file. It need not exist.
const Path = "/etc/gpuckpt/config.toml"

// ErrInvalid is the error of a file that cannot be used.
var ErrInvalid = errors.New("gpuckpt configuration")

// Node is the node's file. The comments on its fields are what docs/reference.md says of the settings.
type Node struct {
	// DriverRoot is where NVIDIA's driver is, such as /run/nvidia/driver. Empty: it is looked for.
	DriverRoot string `toml:"driver_root"`
	// LockTimeout is how long a checkpoint waits for GPU work of all processes, and for processes that
	// were exec'd into the container. Longer work fails the checkpoint. Units: ms, s, m.
	LockTimeout Duration `toml:"lock_timeout"`
	// StallTimeout is how long the driver may do nothing while it moves GPU memory, before it is taken
	// for hung. CRIU has twice as long.
	StallTimeout Duration `toml:"stall_timeout"`
	// Shells decides what becomes of exec'd processes with a terminal: refuse the checkpoint, or end them.
	Shells string `toml:"shells"`
	// HookTimeout is the longest time that a container's annotations may give its hooks.
	HookTimeout Duration `toml:"hook_timeout"`
	// ForkLimit is how many bytes a dump may have more than the container takes, because CRIU writes
	// memory that processes share since a fork for each. 0: half of the room on the dump's disk.
	ForkLimit int64 `toml:"fork_limit"`
	// LogDir keeps the logs of CRIU runs that failed, the last of each kind:
	// NAMESPACE-CONTAINER-dump.log, …-restore.log; and a line for each operation.
	LogDir string `toml:"log_dir"`
	// StateDir keeps a record of each container that is being changed, for gpuckpt recover. It must be
	// on a disk.
	StateDir string `toml:"state_dir"`
	// CDISpecDirs are the directories of the node's CDI specifications. A later one overrides an
	// earlier one, as in containerd's configuration.
	CDISpecDirs []string   `toml:"cdi_spec_dirs"`
	Staging     Staging    `toml:"staging"`
	Restore     Restore    `toml:"restore"`
	Signing     Signing    `toml:"signing"`
	Encryption  Encryption `toml:"encryption"`
	CRIU        CRIU       `toml:"criu"`
	Debug       Debug      `toml:"debug"`
}

// CRIUTimeout is how long CRIU and runc may do nothing in a dump, and how long CRIU may take to
// restore processes without memory (criu.Patience adds to it). It is twice StallTimeout, because both
// also wait for processes that the kernel is slow to stop.
func (n Node) CRIUTimeout() time.Duration { return 2 * time.Duration(n.StallTimeout) }

// LargeMemory returns the memory that a process's mappings hold, in bytes, for them to be copied past
// CRIU; 0 if none are.
func (n Node) LargeMemory() uint64 {
	if !n.Staging.Steer {
		return 0
	}
	return uint64(n.Debug.HostMemory)
}

// Staging is the section [staging]: where GPU state goes on its way.
type Staging struct {
	// Steer decides whether GPU state and large host memory go past CRIU, in files of their own. If not,
	// the driver fills memory of the container and CRIU dumps it, which is slower. Processors other
	// than x86-64 always work so.
	Steer bool `toml:"steer"`
	// Cgroup is the memory cgroup that is charged for GPU state, made when it is first needed: a path
	// without a leading slash. Empty: that of containerd's shims.
	Cgroup string `toml:"cgroup"`
	// MemoryLimit is the limit of that cgroup, in bytes. 0 leaves it as it is.
	MemoryLimit int64 `toml:"memory_limit"`
	// WhenShort decides what becomes of a checkpoint whose GPU state does not fit in memory: refuse,
	// write-through to the disk, or leave it to the driver.
	WhenShort string `toml:"when_short"`
}

// The bounds of Buffer, in bytes.
const (
	MinBuffer = 16 << 20 // the least that a process's state is written through
	maxBuffer = 1 << 30  // more makes a disk no faster
)

// Buffer returns the memory, in bytes, through which GPU state is written to a disk: a quarter of
// MemoryLimit, so that operations beside each other have some.
func (s Staging) Buffer() uint64 {
	if s.MemoryLimit <= 0 {
		return maxBuffer
	}
	return min(max(uint64(s.MemoryLimit)/4, MinBuffer), maxBuffer)
}

// Encryption is the section [encryption]: checkpoints in registries. The shim does not use it.
type Encryption struct {
	// Recipients are files, or directories of files, with public keys or certificates that gpuckpt image
	// push encrypts for. --encrypt replaces them.
	Recipients []string `toml:"recipients"`
}

// DecryptionKeys is the directory of the private keys that pulled images are decrypted with. containerd's
// own decoder has them there.
const DecryptionKeys = "/etc/containerd/ocicrypt/keys"

// CRIU is the section [criu].
type CRIU struct {
	// Path is an absolute path that ends in /criu. Empty: the one that the release came with, else the
	// first in containerd's $PATH.
	Path string `toml:"path"`
	// Options are options of CRIU by the names of its command line: true, a whole number, a string, or a
	// list of strings.
	Options map[string]any `toml:"options"`
}

// MaxCopyThreads is the highest number of threads that can copy in a process.
const MaxCopyThreads = 32

// Debug is the section [debug]: what tests and the benchmark compare with. It may change in any
// release.
type Debug struct {
	// CopyThreads is how many threads copy GPU state in each process, the driver's own included. 0
	// leaves the copying to the driver. Fewer processors have fewer.
	CopyThreads int `toml:"copy_threads"`
	// HostMemory is from how many bytes on a process's host memory, or all shared memory, is copied past
	// CRIU. 0 leaves all to CRIU.
	HostMemory int64 `toml:"host_memory"`
}

// The values of annotations.OnCheckpoint.
const (
	Keep = "keep" // the container continues
	Stop = "stop" // the container ends
)

// Accept is the other value of annotations.ChangedFiles.
const Accept = "accept"

// End is the other value of shells.
const End = "end"

// The values of when_short.
const (
	Refuse       = "refuse"
	WriteThrough = "write-through" // to the disk, as the driver fills
	// Driver heeds the host's memory alone: what the staging cgroup lacks is left to CRIU.
	Driver = "driver"
)

// Duration reads "10s".
type Duration time.Duration

// UnmarshalText reads a Go duration.
func (d *Duration) UnmarshalText(text []byte) error {
	v, err := time.ParseDuration(string(text))
	if err != nil {
		return err
	}
	*d = Duration(v)
	return nil
}

// Default returns the configuration of a node without a file.
func Default() Node {
	return Node{
		LockTimeout:  Duration(10 * time.Second),
		StallTimeout: Duration(time.Minute),
		Shells:       Refuse,
		HookTimeout:  Duration(10 * time.Minute),
		LogDir:       "/var/log/gpuckpt",
		StateDir:     "/var/lib/gpuckpt/records",
		CDISpecDirs:  []string{"/etc/cdi", "/var/run/cdi"},
		Staging:      Staging{Steer: true, Cgroup: "gpuckpt", WhenShort: Refuse},
		Restore:      Restore{Policy: Signed, Keys: []string{"/etc/gpuckpt/keys", "/var/lib/gpuckpt/keys"}, Images: []string{}},
		Signing:      Signing{Key: "/var/lib/gpuckpt/signing.key"},
		Encryption:   Encryption{Recipients: []string{}},
		Debug:        Debug{CopyThreads: 8, HostMemory: 64 << 20},
	}
}

// Load reads the node's file, or the one that Env names. All errors are ErrInvalid.
func Load() (Node, error) {
	path, named := os.LookupEnv(Env)
	if !named {
		path = Path
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && !named {
		return Default().withBundled(), nil
	}
	if err != nil {
		return Node{}, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	node, err := parse(data)
	if err != nil {
		return Node{}, fmt.Errorf("%w: %s: %w", ErrInvalid, path, err)
	}
	return node.withBundled(), nil
}

// withBundled returns the configuration with the criu of the release that this program belongs to,
// if there is one and the file names none.
func (n Node) withBundled() Node {
	self, err := os.Executable()
	if err == nil {
		self, err = filepath.EvalSymlinks(self)
	}
	bundled := filepath.Join(filepath.Dir(self), "..", "lib", "gpuckpt", "criu", "criu")
	if _, missing := os.Stat(bundled); err == nil && missing == nil && n.CRIU.Path == "" {
		n.CRIU.Path = bundled
	}
	return n
}

// Check returns what is wrong with the text of a node's file.
func Check(data []byte) error {
	_, err := parse(data)
	return err
}

// parse is strict: a setting that it does not know is an error.
func parse(data []byte) (Node, error) {
	node := Default()
	if err := Decode(data, &node); err != nil {
		return Node{}, err
	}
	return node, node.check()
}

func (n *Node) check() error {
	if time.Duration(n.LockTimeout) < time.Millisecond { // the driver counts in these; "10" alone is 10 ns
		return fmt.Errorf("lock_timeout is %v; it must be 1ms or more, and a text with its unit, such as \"10s\"", time.Duration(n.LockTimeout))
	}
	if time.Duration(n.StallTimeout) < time.Second { // the kernel counts a process's time in hundredths of one
		return fmt.Errorf("stall_timeout is %v; it must be 1s or more, and a text with its unit, such as \"60s\"", time.Duration(n.StallTimeout))
	}
	if n.DriverRoot != "" && !filepath.IsAbs(n.DriverRoot) {
		return fmt.Errorf("driver_root is %q; it must be an absolute path, such as /run/nvidia/driver", n.DriverRoot)
	}
	if !filepath.IsAbs(n.LogDir) { // who writes there and who reads is in another directory
		return fmt.Errorf("log_dir is %q; it must be an absolute path, such as /var/log/gpuckpt", n.LogDir)
	}
	if !filepath.IsAbs(n.StateDir) {
		return fmt.Errorf("state_dir is %q; it must be an absolute path, such as /var/lib/gpuckpt/records", n.StateDir)
	}
	if err := oneOf(n.Shells, Refuse, End); err != nil {
		return fmt.Errorf("shells %w", err)
	}
	if time.Duration(n.HookTimeout) < time.Millisecond {
		return fmt.Errorf("hook_timeout is %v; it must be 1ms or more, and a text with its unit, such as \"10m\"", time.Duration(n.HookTimeout))
	}
	if n.ForkLimit < 0 {
		return fmt.Errorf("fork_limit is %d; it must not be negative", n.ForkLimit)
	}
	if err := n.Staging.check(); err != nil {
		return fmt.Errorf("[staging] %w", err)
	}
	if err := n.Restore.check(); err != nil {
		return fmt.Errorf("[restore] %w", err)
	}
	if err := n.Signing.check(); err != nil {
		return fmt.Errorf("[signing] %w", err)
	}
	if path := n.CRIU.Path; path != "" && (!filepath.IsAbs(path) || filepath.Base(path) != "criu") {
		return fmt.Errorf("[criu] path is %q; it must be an absolute path that ends in /criu, the name that runc looks for", path)
	}
	for name, value := range n.CRIU.Options {
		if _, err := CRIULines(name, value); err != nil {
			return fmt.Errorf("[criu.options]: %w", err)
		}
	}
	if err := n.Debug.check(); err != nil {
		return fmt.Errorf("[debug] %w", err)
	}
	return nil
}

func (s *Staging) check() error {
	if s.Cgroup != "" && !filepath.IsLocal(s.Cgroup) {
		return fmt.Errorf("cgroup is %q; it must be a path from the root of the hierarchy, without a leading slash", s.Cgroup)
	}
	if s.MemoryLimit != 0 && (s.MemoryLimit < MinBuffer || s.Cgroup == "") {
		return fmt.Errorf("memory_limit is %d bytes; it must be 0 or at least %d, and needs a cgroup", s.MemoryLimit, MinBuffer)
	}
	if err := oneOf(s.WhenShort, Refuse, WriteThrough, Driver); err != nil {
		return fmt.Errorf("when_short %w", err)
	}
	return nil
}

func (d *Debug) check() error {
	if n := d.CopyThreads; n < 0 || n > MaxCopyThreads {
		return fmt.Errorf("copy_threads is %d; it must be from 0 to %d", n, MaxCopyThreads)
	}
	if d.HostMemory < 0 {
		return fmt.Errorf("host_memory is %d; it must not be negative", d.HostMemory)
	}
	return nil
}

// oneOf refuses a value that is none of the words.
func oneOf(value string, words ...string) error {
	if slices.Contains(words, value) {
		return nil
	}
	last := len(words) - 1
	return fmt.Errorf("is %q; it must be \"%s\" or %q", value, strings.Join(words[:last], `", "`), words[last])
}

var optionForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^[a-z0-9-]+$`) })

// CRIULines returns an option of CRIU as lines of its configuration file, see criu(8),
// "CONFIGURATION FILES"; false has none. No value brings a line that sets another option.
func CRIULines(name string, value any) (string, error) {
	if !optionForm().MatchString(name) {
		return "", fmt.Errorf("%q is not a name of an option of CRIU", name)
	}
	switch v := value.(type) {
	case bool:
		if v {
			return name + "\n", nil
		}
		return "", nil
	case int64:
		return fmt.Sprintf("%s %d\n", name, v), nil
	case string:
		if v == "" || strings.ContainsAny(v, "\"'#\\") || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r == 0x7f }) {
			return "", fmt.Errorf("%s: value %q is empty or has quotes, '#', a backslash or control characters", name, v)
		}
		if strings.Contains(v, " ") {
			v = `"` + v + `"`
		}
		return name + " " + v + "\n", nil
	case []any:
		var b strings.Builder
		for _, each := range v {
			s, ok := each.(string)
			if !ok {
				return "", fmt.Errorf("%s: a list may hold strings only, not %v", name, each)
			}
			lines, err := CRIULines(name, s)
			if err != nil {
				return "", err
			}
			b.WriteString(lines)
		}
		return b.String(), nil
	}
	return "", fmt.Errorf("%s: value %v is neither true, false, a string, a whole number nor a list of strings", name, value)
}

// Decode decodes TOML strictly: its error names the settings that into does not have, or the line that is wrong.
func Decode(data []byte, into any) error {
	dec := toml.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	err := dec.Decode(into)
	strict, ok := errors.AsType[*toml.StrictMissingError](err)
	if !ok {
		if wrong, ok := errors.AsType[*toml.DecodeError](err); ok {
			row, _ := wrong.Position()
			return fmt.Errorf("line %d: %w", row, err)
		}
		return err
	}
	var unknown []string
	for _, each := range strict.Errors {
		row, _ := each.Position()
		unknown = append(unknown, fmt.Sprintf("%s (line %d)", strings.Join(each.Key(), "."), row))
	}
	return fmt.Errorf("unknown setting %s", strings.Join(unknown, ", "))
}
