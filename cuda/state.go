// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cuda

import "fmt"

// State is where a CUDA process stands, the driver's CUprocessState.
type State int

// The values are the driver's own. Checkpointing and Restoring are reported by
// drivers from CUDA 13.4 on, while a step is under way.
const (
	Running       State = 0 // CUDA calls go through
	Locked        State = 1 // CUDA calls block, submitted work is done
	Checkpointed  State = 2 // GPU memory is in host memory, no device is held
	Failed        State = 3 // a step failed beyond repair
	Checkpointing State = 4
	Restoring     State = 5
)

var stateNames = map[State]string{
	Running: "running", Locked: "locked", Checkpointed: "checkpointed",
	Failed: "failed", Checkpointing: "checkpointing", Restoring: "restoring",
}

// String returns the state as NVIDIA's cuda-checkpoint prints it.
func (s State) String() string {
	if name, ok := stateNames[s]; ok {
		return name
	}
	return fmt.Sprintf("unknown(%d)", int(s))
}

// MarshalText writes the state's name.
func (s State) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads a name that MarshalText wrote and refuses any other.
func (s *State) UnmarshalText(name []byte) (err error) {
	*s, err = ParseState(string(name))
	return err
}

// ParseState returns the state with a name of String's.
func ParseState(name string) (State, error) {
	for state, n := range stateNames {
		if n == name {
			return state, nil
		}
	}
	return 0, fmt.Errorf("unknown CUDA process state %q", name)
}
