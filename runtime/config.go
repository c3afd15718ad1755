// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/pelletier/go-toml/v2"
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
	// CRIU holds what CRIU is to do.
	CRIU CRIUConfig `toml:"criu"`
}

// CRIUConfig is the section [criu].
type CRIUConfig struct {
	// Path of the criu to use; its directory goes in front of $PATH, where
	// runc looks. Empty: whatever $PATH has.
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
		var strict *toml.StrictMissingError
		if errors.As(err, &strict) {
			return Config{}, fmt.Errorf("unknown setting: %s", strict.String())
		}
		return Config{}, err
	}
	if config.LockTimeout <= 0 {
		return Config{}, fmt.Errorf("lock_timeout is %v; it must be above zero", time.Duration(config.LockTimeout))
	}
	if config.OnCheckpoint != onCheckpointKeep && config.OnCheckpoint != onCheckpointStop {
		return Config{}, fmt.Errorf("on_checkpoint is %q; it must be %q or %q", config.OnCheckpoint, onCheckpointKeep, onCheckpointStop)
	}
	for name, value := range config.CRIU.Options {
		if _, err := criuLines(name, value); err != nil {
			return Config{}, fmt.Errorf("[criu.options]: %w", err)
		}
	}
	return config, nil
}
