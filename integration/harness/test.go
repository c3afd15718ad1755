// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"context"
	"strings"
	"time"
)

// T is what a step of a test needs of its *testing.T. The demonstration and the
// benchmark, which have none, do without the package testing.
type T interface {
	Test
	Helper()
	Context() context.Context
	Logf(format string, args ...any)
	Error(args ...any)
	Errorf(format string, args ...any)
	Fatal(args ...any)
	Fatalf(format string, args ...any)
	Skip(args ...any)
}

// Name makes a name for a container, or a part of an image's, of the test's.
func Name(t T) string {
	other := func(r rune) bool { return (r < 'a' || r > 'z') && (r < '0' || r > '9') }
	return strings.Join(strings.FieldsFunc(strings.ToLower(t.Name()), other), "-")
}

// patience bounds the wait for something that takes milliseconds as a rule.
const patience = 30 * time.Second

// Within waits until something is so, and fails the test if it does not come to
// be.
func Within(t T, what string, so func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v", what, patience)
		}
	}
}

// Says fails the test unless there is an error that has all of the words.
func Says(t T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one that says %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Fatalf("the error does not say %q:\n%v", word, err)
		}
	}
	t.Logf("refused, as it should be: %v", err)
}
