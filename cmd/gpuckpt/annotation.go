// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"runtime"

	"github.com/containerd/containerd/v2/core/containers"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// criuAnnotations are the keys that other tools know checkpoint images by; see
// checkpointctl and CRI-O.
func criuAnnotations(info containers.Container) map[string]string {
	a := map[string]string{
		"org.criu.checkpoint.engine.name":              "containerd",
		annotations.ContainerName:                      info.ID,
		"org.criu.checkpoint.runtime.name":             info.Runtime.Name,
		"org.criu.checkpoint.rootfsImageName":          info.Image,
		"org.criu.checkpoint.rootfsImageUserRequested": info.Image,
		"org.criu.checkpoint.host.arch":                runtime.GOARCH,
	}
	for label, key := range map[string]string{
		"io.kubernetes.container.name": annotations.ContainerName,
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
