// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package host

import (
	"path/filepath"
	"strings"
)

// IsNamed reports whether the cgroup is that of a container, by its name. The name is
// the last part of the path that the spec asks for (linux.cgroupsPath), or the
// container's id where the spec asks for none. It stands alone or, by systemd's
// rules, in "PREFIX-NAME.scope".
func (c *Cgroup) IsNamed(asked, id string) bool {
	name := id
	if asked != "" {
		name = asked[strings.LastIndexAny(asked, "/:")+1:]
	}
	is := filepath.Base(c.dir)
	return name != "" && (is == name || is == name+".scope" || strings.HasSuffix(is, "-"+name+".scope"))
}
