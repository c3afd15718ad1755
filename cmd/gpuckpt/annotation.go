// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"runtime"

	"github.com/containerd/containerd/v2/core/containers"
)

// containerNameAnnotation is the name of the container that a checkpoint image was
// made of. It is not org.criu.checkpoint.container.name: by that key CRI of
// containerd 2.2 and 2.3 knows images in another form, which it refuses to run.
const containerNameAnnotation = "dev.gpuckpt.container.name"

// criuAnnotations are the keys that other tools know checkpoint images by; see
// checkpointctl and CRI-O.
func criuAnnotations(info containers.Container) map[string]string {
	a := map[string]string{
		"org.criu.checkpoint.engine.name":              "containerd",
		containerNameAnnotation:                        info.ID,
		"org.criu.checkpoint.runtime.name":             info.Runtime.Name,
		"org.criu.checkpoint.rootfsImageName":          info.Image,
		"org.criu.checkpoint.rootfsImageUserRequested": info.Image,
		"org.criu.checkpoint.host.arch":                runtime.GOARCH,
	}
	for label, key := range map[string]string{
		"io.kubernetes.container.name": containerNameAnnotation,
		"io.kubernetes.pod.name":       "org.criu.checkpoint.pod.name",
		"io.kubernetes.pod.namespace":  "org.criu.checkpoint.pod.namespace",
		"io.kubernetes.pod.uid":        "org.criu.checkpoint.pod.uid",
	} {
		if v := info.Labels[label]; v != "" {
			a[key] = v
		}
	}
	return a
}
