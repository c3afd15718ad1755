// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import "fmt"

// Failure is an error with a reason for a condition, which no other try would mend.
type Failure struct {
	Reason string
	Err    error
}

func (f *Failure) Error() string { return f.Err.Error() }

// Unwrap is of errors.
func (f *Failure) Unwrap() error { return f.Err }

// Fail returns a Failure, by a format as fmt.Errorf has it.
func Fail(reason, format string, args ...any) *Failure {
	return &Failure{reason, fmt.Errorf(format, args...)}
}
