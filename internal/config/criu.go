// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// CRIULines returns an option of CRIU as lines of its configuration file, see
// criu(8), "CONFIGURATION FILES". An option that is false has none. No value can
// bring a line with it that sets another option.
func CRIULines(name string, value any) (string, error) {
	if name == "" {
		return "", errors.New("an option of CRIU has no name")
	}
	for _, r := range name {
		if r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9') {
			return "", fmt.Errorf("%q is not a name of an option of CRIU", name)
		}
	}
	switch v := value.(type) {
	case bool:
		if v {
			return name + "\n", nil
		}
		return "", nil
	case int64:
		return name + " " + strconv.FormatInt(v, 10) + "\n", nil
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
