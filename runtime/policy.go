// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package runtime

import (
	"fmt"
	"path"
	"strings"

	"github.com/containerd/errdefs"
)

// restoreAnnotation on a container asks that its image, a checkpoint, is resumed
// ("true") or started afresh ("false"). On a pod it reaches the shim only if
// containerd's configuration of the runtime lets it: pod_annotations =
// ["dev.gpuckpt.*"].
const restoreAnnotation = "dev.gpuckpt.restore"

// imageNameAnnotation is where containerd's CRI service writes the image's name.
// Other clients write it nowhere that a shim can see.
const imageNameAnnotation = "io.kubernetes.cri.image-name"

// The policies of [restore].
const (
	policyNever     = "never"
	policyAnnotated = "annotated"
	policyAlways    = "always"
)

// RestoreConfig is the section [restore].
type RestoreConfig struct {
	// Policy says whether containers of a checkpoint image are resumed:
	// "never", "annotated" (if the container asks for it) or "always".
	Policy string `toml:"policy"`
	// Images are patterns of names (path.Match) of the images that may be
	// resumed. Empty: all.
	Images []string `toml:"images"`
}

func (r RestoreConfig) check() error {
	switch r.Policy {
	case policyNever, policyAnnotated, policyAlways:
	default:
		return fmt.Errorf("[restore] policy is %q; it must be %q, %q or %q", r.Policy, policyNever, policyAnnotated, policyAlways)
	}
	for _, pattern := range r.Images {
		if _, err := path.Match(pattern, ""); err != nil || pattern == "" {
			return fmt.Errorf("[restore] images: %q is no pattern", pattern)
		}
	}
	return nil
}

// wanted says whether a container asks to be resumed.
func wanted(annotations map[string]string) bool { return annotations[restoreAnnotation] == "true" }

// decide says whether a container of a checkpoint image is resumed. If not, it
// gives the reason to start afresh, or an error when that is not what whoever
// made the container can have meant.
func (r RestoreConfig) decide(annotations map[string]string) (afresh string, err error) {
	switch value, annotated := annotations[restoreAnnotation]; {
	case annotated && value != "true" && value != "false":
		return "", fmt.Errorf("annotation %s is %q; it must be \"true\" or \"false\": %w", restoreAnnotation, value, errdefs.ErrInvalidArgument)
	case value == "false":
		return fmt.Sprintf("annotation %s is \"false\"", restoreAnnotation), nil
	case r.Policy == policyNever && annotated:
		return "", fmt.Errorf("annotation %s asks for a restore, and this node allows none ([restore] policy in %s): %w", restoreAnnotation, ConfigPath, errdefs.ErrFailedPrecondition)
	case r.Policy == policyNever:
		return "[restore] policy is \"never\"", nil
	case r.Policy == policyAnnotated && !annotated:
		return fmt.Sprintf("it has no annotation %s=true", restoreAnnotation), nil
	}
	if len(r.Images) == 0 {
		return "", nil
	}
	name, known := annotations[imageNameAnnotation]
	if !known {
		return "", fmt.Errorf("this node resumes only images that [restore] images in %s names, and the client does not say which image this is (only Kubernetes does, by %s); annotation %s=false starts it afresh: %w",
			ConfigPath, imageNameAnnotation, restoreAnnotation, errdefs.ErrFailedPrecondition)
	}
	for _, pattern := range r.Images {
		if ok, err := path.Match(pattern, name); ok && err == nil {
			return "", nil
		}
	}
	return "", fmt.Errorf("image %s is not among those that this node resumes, %s ([restore] images in %s); annotation %s=false starts it afresh: %w",
		name, strings.Join(r.Images, ", "), ConfigPath, restoreAnnotation, errdefs.ErrFailedPrecondition)
}
