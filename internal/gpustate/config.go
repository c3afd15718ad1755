package gpustate

import "time"

type Config struct {
	Helper      string
	LockTimeout time.Duration
	Staging     StagingConfig
}
type StagingConfig struct {
	Steer       bool
	CopyThreads int
	Cgroup      string
	MemoryLimit int64
	WhenShort   string
	Buffer      int64
}

const (
	WhenShortRefuse     = "refuse"
	WhenShortThrough    = "write-through"
	WhenShortDriver     = "driver"
	configPath          = "/etc/gpuckpt/config.toml"
	WhenShortAnnotation = "dev.gpuckpt.when-short"
)
