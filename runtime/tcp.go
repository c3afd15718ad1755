// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

// tcpDefault is the option that decides what becomes of established TCP connections
// where nobody has decided: they are dumped as they are, so that a dump does not
// fail because of one, and come back closed, because their other ends know nothing
// of a restore and the address may be another. Who wants them open says so
// (tcp-established), which is right for connections inside the container.
//
// It is "" where the options or base, CRIU's own configuration, have one of the two.
func (c *container) tcpDefault(options map[string]any, base string) string {
	for _, name := range []string{"tcp-established", "tcp-close"} {
		if _, set := options[name]; set || hasOption(base, name) {
			return ""
		}
	}
	if c.restore != nil && c.pid == 0 {
		return "tcp-close"
	}
	return "tcp-established"
}
