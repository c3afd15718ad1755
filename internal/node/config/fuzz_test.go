// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"slices"
	"strings"
	"testing"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Whatever a container's annotation says, CRIU's settings get one line of it, for an option that a
// container may set.
func FuzzCRIUAnnotation(f *testing.F) {
	f.Add("timeout", "30")
	f.Add("ghost-limit", "1M\naction-script /bin/sh")
	f.Add("network-lock", "skip\" # \\")
	f.Add("action-script", "/bin/sh")
	f.Add("link-remap\nlibdir /tmp", "true")
	f.Fuzz(func(t *testing.T, name, value string) {
		options, err := View{Annotations: map[string]string{annotations.CRIUPrefix + name: value}}.CRIUOptions()
		if err != nil {
			return
		}
		for option, value := range options {
			text, err := CRIULines(option, value)
			if err != nil {
				continue
			}
			if !slices.Contains(criuAnnotations, option) {
				t.Fatalf("a container sets %q", option)
			}
			if strings.Count(text, "\n") > 1 || text != "" && (!strings.HasSuffix(text, "\n") || strings.Fields(text)[0] != option) {
				t.Fatalf("CRIU is told %q", text)
			}
			if strings.ContainsAny(strings.TrimSuffix(text, "\n"), "\r\v\f\x00") {
				t.Fatalf("CRIU is told %q", text)
			}
		}
	})
}
