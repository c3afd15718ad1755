// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/hex"
	"fmt"
	"strings"
)

// ParseUUID reads "GPU-" and a UUID in lower or upper case, as nvidia-smi -L
// prints it. The prefix may be missing.
func ParseUUID(s string) ([16]byte, error) {
	var id [16]byte
	digits := strings.TrimPrefix(s, "GPU-")
	if len(digits) != 36 || digits[8] != '-' || digits[13] != '-' || digits[18] != '-' || digits[23] != '-' {
		return id, fmt.Errorf("%q is not a GPU's UUID", s)
	}
	digits = digits[:8] + digits[9:13] + digits[14:18] + digits[19:23] + digits[24:]
	if _, err := hex.Decode(id[:], []byte(digits)); err != nil {
		return id, fmt.Errorf("%q is not a GPU's UUID", s)
	}
	return id, nil
}

// FormatUUID writes the form that ParseUUID reads, in lower case.
func FormatUUID(id [16]byte) string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", id[0:4], id[4:6], id[6:8], id[8:10], id[10:])
}
