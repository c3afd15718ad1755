// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/pelletier/go-toml/v2"

	"github.com/gpuckpt/gpuckpt/internal/staging"
	"github.com/gpuckpt/gpuckpt/internal/steer"
)

// ConfigEnv names a configuration file in place of ConfigPath, in the
// environment of containerd, which its shims inherit.
const ConfigEnv = "GPUCKPT_CONFIG"

// ConfigPath is the node's configuration. It need not be there.
const ConfigPath = "/etc/gpuckpt/config.toml"

// ErrConfig says that the node's configuration cannot be used.
var ErrConfig = errors.New("gpuckpt configuration")

// Config is the node's configuration; docs/configuration.md describes it. It
// is read at the start of each operation, so an edit needs no restart.
type Config struct {
	// Helper is the path of gpuckpt-cuda-helper. Empty: beside the shim, then
	// in $PATH.
	Helper string `toml:"helper"`
	// LockTimeout is how long the work that a process has submitted to its
	// GPUs may take to finish. CRIU's CUDA plugin has the same default, 10 s.
	LockTimeout Duration `toml:"lock_timeout"`
	// OnCheckpoint decides whether a container goes on after a checkpoint
	// whose request does not say: "keep" or "stop".
	OnCheckpoint string `toml:"on_checkpoint"`
	// LogDir keeps the logs of CRIU runs that failed, one of each kind for a
	// container.
	LogDir string `toml:"log_dir"`
	// CDISpecDirs are the directories of the node's CDI specifications, the
	// last ones winning, as in containerd's configuration.
	CDISpecDirs []string `toml:"cdi_spec_dirs"`
	// Staging holds where GPU state goes on its way.
	Staging StagingConfig `toml:"staging"`
	// Restore says which containers of checkpoint images are resumed.
	Restore RestoreConfig `toml:"restore"`
	// CRIU holds what CRIU is to do.
	CRIU CRIUConfig `toml:"criu"`
}

// StagingConfig is the section [staging].
type StagingConfig struct {
	// Steer says whether GPU state is taken past CRIU, in files of its own.
	// Without, the driver fills memory of the container and CRIU dumps it.
	Steer bool `toml:"steer"`
	// CopyThreads is how many threads copy GPU state in each process, the driver's
	// own among them; 0 leaves the copying to the driver. Fewer do where the
	// container or the machine has fewer processors.
	CopyThreads int `toml:"copy_threads"`
	// Cgroup is what the memory for GPU state is charged to, a path from the
	// root of the memory hierarchy. Empty: the cgroup of containerd's shims.
	Cgroup string `toml:"cgroup"`
	// MemoryLimit bounds that cgroup, in bytes; 0 leaves it as it is.
	MemoryLimit int64 `toml:"memory_limit"`
	// WhenShort says what becomes of a checkpoint whose GPU state does not fit in
	// memory: whenShortRefuse, whenShortThrough or whenShortDriver.
	WhenShort string `toml:"when_short"`
	// Buffer is the memory that state takes which is written through, in bytes.
	Buffer int64 `toml:"buffer"`
}

// CRIUConfig is the section [criu].
type CRIUConfig struct {
	// Path of the criu to use, absolute and named so; its directory goes in
	// front of $PATH, where runc looks. Empty: whatever $PATH has.
	Path string `toml:"path"`
	// PluginDir is where criu looks for its plugins. A cuda_plugin.so there
	// is kept from acting a second time.
	PluginDir string `toml:"plugin_dir"`
	// Options are lines for CRIU's configuration file, by the names of its
	// command line: true, a string, a number, or a list of strings.
	Options map[string]any `toml:"options"`
}

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

// defaultConfig is the configuration of a node without a file.
func defaultConfig() Config {
	return Config{
		LockTimeout:  Duration(10 * time.Second),
		OnCheckpoint: onCheckpointKeep,
		LogDir:       "/var/log/gpuckpt",
		CDISpecDirs:  []string{"/etc/cdi", "/var/run/cdi"},
		Staging:      StagingConfig{Steer: true, CopyThreads: 8, Cgroup: "gpuckpt", WhenShort: whenShortRefuse, Buffer: 1 << 30},
		Restore:      RestoreConfig{Policy: policyAnnotated, Images: []string{}},
	}
}

// LoadConfig reads the node's configuration. A missing file gives the
// defaults, but not one that ConfigEnv names. All errors are ErrConfig.
func LoadConfig() (Config, error) {
	path, named := os.LookupEnv(ConfigEnv)
	if !named {
		path = ConfigPath
	}
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) && !named {
		return defaultConfig(), nil
	}
	if err != nil {
		return Config{}, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	config, err := parseConfig(data)
	if err != nil {
		return Config{}, fmt.Errorf("%w: %s: %w", ErrConfig, path, err)
	}
	return config, nil
}

// parseConfig is strict: a setting it does not know is an error.
func parseConfig(data []byte) (Config, error) {
	config := defaultConfig()
	dec := toml.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&config); err != nil {
		return Config{}, unknownSettings(err)
	}
	if time.Duration(config.LockTimeout) < time.Millisecond { // the driver counts in these; "10" alone is 10 ns
		return Config{}, fmt.Errorf("lock_timeout is %v; it must be 1ms or more, and a text with its unit, such as \"10s\"", time.Duration(config.LockTimeout))
	}
	if config.OnCheckpoint != onCheckpointKeep && config.OnCheckpoint != onCheckpointStop {
		return Config{}, fmt.Errorf("on_checkpoint is %q; it must be %q or %q", config.OnCheckpoint, onCheckpointKeep, onCheckpointStop)
	}
	if g := config.Staging.Cgroup; g != "" && !filepath.IsLocal(g) {
		return Config{}, fmt.Errorf("[staging] cgroup is %q; it must be a path from the root of the hierarchy, without a leading slash", g)
	}
	if config.Staging.MemoryLimit < 0 || config.Staging.MemoryLimit > 0 && config.Staging.Cgroup == "" {
		return Config{}, fmt.Errorf("[staging] memory_limit is %d; it must not be negative, and needs a cgroup", config.Staging.MemoryLimit)
	}
	if n := config.Staging.CopyThreads; n < 0 || n > steer.MaxCopyThreads {
		return Config{}, fmt.Errorf("[staging] copy_threads is %d; it must be from 0 to %d", n, steer.MaxCopyThreads)
	}
	if err := checkWhenShort(config.Staging.WhenShort); err != nil {
		return Config{}, fmt.Errorf("[staging] when_short %w", err)
	}
	if config.Staging.Buffer < staging.MinWindow {
		return Config{}, fmt.Errorf("[staging] buffer is %d; it must be %d or more", config.Staging.Buffer, staging.MinWindow)
	}
	if err := config.Restore.check(); err != nil {
		return Config{}, err
	}
	if path := config.CRIU.Path; path != "" && (!filepath.IsAbs(path) || filepath.Base(path) != "criu") {
		return Config{}, fmt.Errorf("[criu] path is %q; it must be an absolute path that ends in /criu, the name that runc looks for", path)
	}
	for name, value := range config.CRIU.Options {
		if _, err := criuLines(name, value); err != nil {
			return Config{}, fmt.Errorf("[criu.options]: %w", err)
		}
	}
	return config, nil
}

// unknownSettings makes the error of a strict TOML decoder name the settings
// that are not known, in one line.
func unknownSettings(err error) error {
	var strict *toml.StrictMissingError
	if !errors.As(err, &strict) {
		return err
	}
	var names []string
	for _, each := range strict.Errors {
		row, _ := each.Position()
		names = append(names, fmt.Sprintf("%s (line %d)", strings.Join(each.Key(), "."), row))
	}
	return fmt.Errorf("unknown setting %s", strings.Join(names, ", "))
}
