// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package iouring

import (
	"errors"
	"slices"
	"testing"

	criucore "github.com/checkpoint-restore/go-criu/v8/crit/images/criu-core"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/internal/criu"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

func TestDeny(t *testing.T) {
	dumpWith := func(mode criucore.SeccompMode) *criu.Dump {
		return &criu.Dump{Tasks: []criu.Task{{Threads: []*criucore.ThreadCoreEntry{{SeccompMode: &mode}}}}}
	}
	filtered, bare := dumpWith(criucore.SeccompMode_filter), dumpWith(criucore.SeccompMode_disabled)
	profile := func(names ...string) *specs.LinuxSeccomp {
		return &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{{Names: names, Action: specs.ActAllow}}}
	}
	for name, test := range map[string]struct {
		seccomp    *specs.LinuxSeccomp
		gpu        bool
		annotation string
		dump       *criu.Dump
		rule, none bool // has the rule in the end; has no profile
	}{
		"GPU":                              {gpu: true, rule: true},
		"no GPU":                           {none: true},
		"a profile":                        {seccomp: profile("read"), rule: true},
		"a profile that names it":          {seccomp: profile("read", setup), gpu: true},
		"allowed":                          {gpu: true, annotation: "allow", none: true},
		"allowed, with a profile":          {seccomp: profile("read"), annotation: "allow"},
		"denied":                           {gpu: true, annotation: "deny", rule: true},
		"restored with filters":            {gpu: true, dump: filtered, rule: true},
		"restored without":                 {gpu: true, dump: bare, none: true},
		"restored without, into a profile": {gpu: true, seccomp: profile("read"), dump: bare, rule: true},
	} {
		t.Run(name, func(t *testing.T) {
			var view config.View
			if test.annotation != "" {
				view.Annotations = map[string]string{annotations.IOUring: test.annotation}
			}
			spec := &specs.Spec{Linux: &specs.Linux{Seccomp: test.seccomp}}
			for range 2 { // the second time it is there
				if err := Deny(spec, view, test.gpu, test.dump); err != nil {
					t.Fatal(err)
				}
			}
			got := spec.Linux.Seccomp
			if (got == nil) != test.none {
				t.Fatalf("the profile is %+v", got)
			}
			rules := 0
			if got != nil {
				for _, s := range got.Syscalls {
					if slices.Contains(s.Names, setup) && s.Action == specs.ActErrno && *s.ErrnoRet == 38 {
						rules++
					}
				}
				if test.seccomp == nil && got.DefaultAction != specs.ActAllow {
					t.Errorf("the profile denies more: %+v", got)
				}
			}
			if rules > 1 || (rules == 1) != test.rule {
				t.Errorf("%d rules in %+v", rules, got)
			}
		})
	}
	view := config.View{Annotations: map[string]string{annotations.IOUring: "yes"}}
	if err := Deny(&specs.Spec{Linux: &specs.Linux{}}, view, true, nil); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("another word: %v", err)
	}
}
