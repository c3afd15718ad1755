// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package api

import (
	"maps"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ofOldPod are the ends of annotations that are not for a copy. Network plugins have written the last ones, and
// would give the copy the old pod's address, which is another node's. Kube-OVN's begin with the network, if any.
var ofOldPod = []string{
	corev1.LastAppliedConfigAnnotation, ImagesAnnotation, MigrationAnnotation, AfterAnnotation, Refused,
	"k8s.ovn.org/pod-networks", "k8s.v1.cni.cncf.io/network-status",
	"cni.projectcalico.org/containerID", "cni.projectcalico.org/podIP", "cni.projectcalico.org/podIPs",
	"ovn.kubernetes.io/allocated", "ovn.kubernetes.io/routed", "ovn.kubernetes.io/ip_address", "ovn.kubernetes.io/mac_address",
}

// Again returns a pod with the specification of another one that is restored on whatever node. It pulls with a
// secret, if there is one. Whose pod the other one was, and what became of it, does not go on.
func Again(old *corev1.Pod, name, secret string) *corev1.Pod {
	to := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: old.Namespace, Name: name, Labels: maps.Clone(old.Labels), Annotations: maps.Clone(old.Annotations)},
		Spec:       *old.Spec.DeepCopy(),
	}
	maps.DeleteFunc(to.Annotations, func(key, _ string) bool {
		return slices.ContainsFunc(ofOldPod, func(end string) bool { return strings.HasSuffix(key, end) })
	})
	metav1.SetMetaDataAnnotation(&to.ObjectMeta, RestoreAnnotation, "true")
	to.Spec.NodeName, to.Spec.EphemeralContainers = "", nil
	if reference := (corev1.LocalObjectReference{Name: secret}); secret != "" && !slices.Contains(to.Spec.ImagePullSecrets, reference) {
		to.Spec.ImagePullSecrets = append(to.Spec.ImagePullSecrets, reference)
	}
	return to
}

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
