// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// Images returns the images that a Checkpoint has made, by the names of the containers. They are in the
// repository that was admitted, whatever the agent that pushed them says.
func (c *Checkpoint) Images() map[string]string {
	images := map[string]string{}
	for _, made := range c.Status.Containers {
		image := made.Image
		if tag, ok := strings.CutPrefix(image, c.Spec.Repository+":"); !ok || strings.Contains(tag, "/") {
			image = c.Spec.Repository
		}
		images[made.Name] = image + "@" + made.Digest
	}
	return images
}

// SetImages sets the images of a pod's containers, by name, sidecars included. It returns the name of a
// container that has none, "" if each has; init containers need none.
func SetImages(spec *corev1.PodSpec, images map[string]string) (missing string) {
	for i := range spec.InitContainers {
		if c := &spec.InitContainers[i]; images[c.Name] != "" {
			c.Image = images[c.Name]
		}
	}
	for i := range spec.Containers {
		c := &spec.Containers[i]
		if images[c.Name] == "" {
			missing = c.Name
			continue
		}
		c.Image = images[c.Name]
	}
	return missing
}
