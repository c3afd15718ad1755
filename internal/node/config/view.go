// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// View is what one operation on a container goes by.
type View struct {
	Node
	Annotations map[string]string // the container's
}

// Source returns the View of one operation. Its first call reads the node's file.
type Source func() (View, error)

// For returns the Source of one operation on a container with these annotations.
func For(annotations map[string]string) Source {
	return sync.OnceValues(func() (View, error) {
		node, err := Load()
		return View{node, annotations}, err
	})
}

// StopsAfterCheckpoint reports whether a checkpoint ends the container by default.
func (v View) StopsAfterCheckpoint() (bool, error) {
	want, err := v.choose(annotations.OnCheckpoint, Keep, Keep, Stop)
	return want == Stop, err
}

// AcceptsChangedFiles reports whether files on the container's volumes may have changed since the
// checkpoint.
func (v View) AcceptsChangedFiles() (bool, error) {
	want, err := v.choose(annotations.ChangedFiles, Refuse, Refuse, Accept)
	return want == Accept, err
}

// HasInterposer reports whether the container's programs load the interposer.
func (v View) HasInterposer() (bool, error) {
	key := annotations.Interposer
	if _, old := v.Annotations[annotations.Companion]; old {
		key = annotations.Companion
	}
	want, err := v.choose(key, "false", "true", "false")
	return want == "true", err
}

// AllowsIOUring reports whether the container may use io_uring.
func (v View) AllowsIOUring() (bool, error) {
	want, err := v.choose(annotations.IOUring, Deny, Deny, Allow)
	return want == Allow, err
}

// The values of annotations.IOUring.
const (
	Deny  = "deny"
	Allow = "allow"
)

// choose returns the value of an annotation, which must be one of the words, or else the default.
func (v View) choose(key, otherwise string, words ...string) (string, error) {
	value, annotated := v.Annotations[key]
	if !annotated {
		return otherwise, nil
	}
	if err := oneOf(value, words...); err != nil {
		return "", fmt.Errorf("annotation %s %w: %w", key, err, errdefs.ErrInvalidArgument)
	}
	return value, nil
}

// criuAnnotations are the options of CRIU that a container may set for itself. Others
// (action-script, libdir, external) reach beyond the container, so only the node's file may.
var criuAnnotations = []string{
	"tcp-established", "tcp-close", "ghost-limit",
}

// CRIUOptions returns the node's options of CRIU with the container's over them.
func (v View) CRIUOptions() (map[string]any, error) {
	options := make(map[string]any)
	maps.Copy(options, v.CRIU.Options)
	for key, value := range v.Annotations {
		name, ours := strings.CutPrefix(key, annotations.CRIUPrefix)
		if !ours {
			continue
		}
		if !slices.Contains(criuAnnotations, name) {
			return nil, fmt.Errorf("annotation %s: a container may set only %s%s: %w", key, annotations.CRIUPrefix, strings.Join(criuAnnotations, ", "), errdefs.ErrInvalidArgument)
		}
		switch value {
		case "true", "":
			options[name] = true
		case "false":
			options[name] = false
		default:
			options[name] = value
		}
	}
	return options, nil
}

// The values of [restore] policy.
const (
	Never     = "never"
	Signed    = "signed"
	Annotated = "annotated"
	Always    = "always"
)

// Restore is the section [restore]: which containers of checkpoint images are restored.
type Restore struct {
	// Policy decides which checkpoints are restored: never, signed, annotated or always.
	Policy string `toml:"policy"`
	// Keys are files, or directories, with the public keys that this node trusts besides its own. The
	// agent keeps the second directory.
	Keys []string `toml:"keys"`
	// Images are patterns of names, and digests of manifests (sha256:…). A node restores only images
	// that one of them fits. Empty: all.
	Images []string `toml:"images"`
}

// Signing is the section [signing].
type Signing struct {
	// Key is the file of the private key that signs this node's checkpoints, made when it is first
	// needed. Empty: they are not signed.
	Key string `toml:"key"`
}

func (s Signing) check() error {
	if s.Key != "" && !path.IsAbs(s.Key) {
		return fmt.Errorf("key is %q; it must be an absolute path, or empty", s.Key)
	}
	return nil
}

// digestForm matches a digest among Images.
var digestForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^sha256:[0-9a-f]{64}$`) })

func (r Restore) check() error {
	if err := oneOf(r.Policy, Never, Signed, Annotated, Always); err != nil {
		return fmt.Errorf("policy %w", err)
	}
	for _, key := range r.Keys {
		if !path.IsAbs(key) {
			return fmt.Errorf("keys: %q is not an absolute path", key)
		}
	}
	for _, pattern := range r.Images {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return fmt.Errorf("images: %q is not a pattern", pattern)
		}
	}
	return nil
}

// NeedsSignature reports whether a checkpoint must have a signature that counts, also one
// that a client of containerd names.
func (r Restore) NeedsSignature() bool { return r.Policy == Never || r.Policy == Signed }

// ListsDigests reports whether Images has digests of manifests.
func (r Restore) ListsDigests() bool { return slices.ContainsFunc(r.Images, digestForm().MatchString) }

// AsksForRestore reports whether a container asks for a restore of its image.
func AsksForRestore(container map[string]string) bool {
	return container[annotations.Restore] == "true" || PrefersRestore(container)
}

// PrefersRestore reports whether a container starts afresh where its image cannot be restored.
func PrefersRestore(container map[string]string) bool {
	return container[annotations.Restore] == "prefer"
}

// StartsAfresh decides whether a container of a checkpoint image is restored. If not, it returns
// the reason to start it afresh, or an error when whoever made it cannot have meant that.
func (v View) StartsAfresh() (reason string, err error) {
	const key = annotations.Restore
	switch value, annotated := v.Annotations[key]; {
	case annotated && value != "true" && value != "false" && value != "prefer":
		return "", fmt.Errorf("annotation %s is %q; it must be \"true\", \"prefer\" or \"false\": %w", key, value, errdefs.ErrInvalidArgument)
	case value == "false":
		return fmt.Sprintf("annotation %s is \"false\"", key), nil
	case v.Restore.Policy == Never && annotated:
		return "", fmt.Errorf("annotation %s asks for a restore, and this node allows none ([restore] policy in %s): %w", key, Path, errdefs.ErrFailedPrecondition)
	case v.Restore.Policy == Never:
		return "[restore] policy is \"never\"", nil
	case v.Restore.Policy != Always && !annotated:
		return fmt.Sprintf("it has no annotation %s=true", key), nil
	}
	return "", nil
}

// AllowsImage refuses an image that [restore] images does not list. digest is that of the
// checkpoint's manifest, "" if it is not known.
func (v View) AllowsImage(digest string) error {
	const key = annotations.Restore
	name, known := v.Annotations[annotations.CRIImageName]
	matches := func(pattern string) bool {
		ok, _ := path.Match(pattern, name)
		return known && ok || pattern == digest
	}
	switch {
	case len(v.Restore.Images) == 0 || slices.ContainsFunc(v.Restore.Images, matches):
		return nil
	case !known && !v.Restore.ListsDigests():
		return fmt.Errorf("this node restores only images that [restore] images in %s names, and the client does not say which image this is (only Kubernetes does, by %s); annotation %s=false starts it afresh: %w",
			Path, annotations.CRIImageName, key, errdefs.ErrFailedPrecondition)
	case !known:
		name = "of the manifest " + digest
	}
	return fmt.Errorf("image %s is not among those that this node restores, %s ([restore] images in %s); annotation %s=false starts it afresh: %w",
		name, strings.Join(v.Restore.Images, ", "), Path, key, errdefs.ErrFailedPrecondition)
}
