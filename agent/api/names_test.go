// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

// A pod's name may have a dot or a dash where its Checkpoint's is cut.
func TestEvictionName(t *testing.T) {
	long := strings.Repeat("a", 49)
	for _, pod := range []string{"job", long + ".b", long + "-b", long[:48] + "-.b", strings.Repeat("a.b-c", 50)} {
		name := EvictionName(pod, "0123456789abcdef")
		if wrong := validation.IsDNS1123Subdomain(name); len(wrong) > 0 || len(name) > 63 || !strings.HasSuffix(name, "-01234567") {
			t.Errorf("of the pod %s: %s: %v", pod, name, wrong)
		}
	}
}
