// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import "testing"

func TestTCPDefault(t *testing.T) {
	for name, tt := range map[string]struct {
		pid     int
		restore *restoreState
		options map[string]any
		base    string
		want    string
	}{
		"dump":                        {7, nil, nil, "", "tcp-established"},
		"restore":                     {0, &restoreState{}, nil, "", "tcp-close"},
		"dump of what was restored":   {7, &restoreState{}, nil, "", "tcp-established"},
		"open on request":             {0, &restoreState{}, map[string]any{"tcp-established": true}, "", ""},
		"dump refused on request":     {7, nil, map[string]any{"tcp-established": false}, "", ""},
		"as CRIU's configuration has": {7, nil, nil, "tcp-close\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			c := &container{pid: tt.pid, restore: tt.restore}
			if got := c.tcpDefault(tt.options, tt.base); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
