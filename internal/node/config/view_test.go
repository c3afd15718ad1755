// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"strings"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

func TestStartsAfresh(t *testing.T) {
	name := func(n string) map[string]string {
		return map[string]string{annotations.Restore: "true", annotations.CRIImageName: n}
	}
	for what, c := range map[string]struct {
		config    Restore
		container map[string]string
		afresh    string
		refused   error
	}{
		"signed, asked":     {Restore{Policy: Signed}, name("x"), "", nil},
		"signed, not asked": {Restore{Policy: Signed}, nil, "no annotation", nil},
		"asked":             {Restore{Policy: Annotated}, name("x"), "", nil},
		"not asked":         {Restore{Policy: Annotated}, nil, "no annotation", nil},
		"always":            {Restore{Policy: Always}, nil, "", nil},
		"asked not to":      {Restore{Policy: Always}, map[string]string{annotations.Restore: "false"}, "is \"false\"", nil},
		"never":             {Restore{Policy: Never}, nil, "never", nil},
		"preferred":         {Restore{Policy: Signed}, map[string]string{annotations.Restore: "prefer"}, "", nil},
		"never and asked":   {Restore{Policy: Never}, name("x"), "", errdefs.ErrFailedPrecondition},
		"misspelt":          {Restore{Policy: Always}, map[string]string{annotations.Restore: "1"}, "", errdefs.ErrInvalidArgument},
	} {
		afresh, err := View{Node{Restore: c.config}, c.container}.StartsAfresh()
		if !errors.Is(err, c.refused) || (afresh == "") != (c.afresh == "") || !strings.Contains(afresh, c.afresh) {
			t.Errorf("%s: got %q, %v", what, afresh, err)
		}
	}
}

func TestAllowsImage(t *testing.T) {
	digest := "sha256:" + strings.Repeat("0a", 32)
	for what, c := range map[string]struct {
		images       []string
		name, digest string
		refused      string
	}{
		"no list":             {nil, "", "", ""},
		"listed":              {[]string{"a/*", "b.com/c:*"}, "b.com/c:1", "", ""},
		"by its own digest":   {[]string{"b.com/*@" + digest}, "b.com/c@" + digest, "", ""},
		"not listed":          {[]string{"a/*"}, "a/b/c", "", "image a/b/c is not among"},
		"no name":             {[]string{"a/*"}, "", "", "does not say which image"},
		"the manifest":        {[]string{"a/*", digest}, "b", digest, ""},
		"the manifest, alone": {[]string{digest}, "", digest, ""},
		"another manifest":    {[]string{digest}, "", "sha256:1", "manifest sha256:1 is not among"},
		"no manifest":         {[]string{digest}, "", "", "is not among"},
		"a name like one":     {[]string{digest}, digest, "", ""},
	} {
		container := map[string]string{}
		if c.name != "" {
			container[annotations.CRIImageName] = c.name
		}
		err := View{Node{Restore: Restore{Images: c.images}}, container}.AllowsImage(c.digest)
		if (err == nil) != (c.refused == "") || err != nil && (!strings.Contains(err.Error(), c.refused) || !errdefs.IsFailedPrecondition(err)) {
			t.Errorf("%s: got %v", what, err)
		}
	}
}

func TestAllowsIOUring(t *testing.T) {
	for value, want := range map[string]bool{"allow": true, "deny": false} {
		if got, err := (View{Annotations: map[string]string{annotations.IOUring: value}}).AllowsIOUring(); err != nil || got != want {
			t.Errorf("%q: got %v, %v", value, got, err)
		}
	}
	if got, err := (View{}).AllowsIOUring(); err != nil || got {
		t.Errorf("without an annotation: got %v, %v", got, err)
	}
	if _, err := (View{Annotations: map[string]string{annotations.IOUring: "true"}}).AllowsIOUring(); !errors.Is(err, errdefs.ErrInvalidArgument) {
		t.Errorf("another word: got %v", err)
	}
}

// An operation sees one file, whatever becomes of it meanwhile.
func TestSourceReadsOnce(t *testing.T) {
	useConfig(t, `log_dir = "/logs"`)
	read := For(nil)
	first, err := read()
	if err != nil {
		t.Fatal(err)
	}
	useConfig(t, `nonsense`)
	if second, err := read(); err != nil || first.LogDir != second.LogDir {
		t.Errorf("the second time: %v, %v", second, err)
	}
	if _, err := For(nil)(); !errors.Is(err, ErrInvalid) {
		t.Errorf("another operation: %v", err)
	}
}
