// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"maps"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// copyOf returns the pod that is to go on: the old one's specification, for another node, with a gate
// until there is an image to restore.
func copyOf(old *corev1.Pod, m *api.Migration) *corev1.Pod {
	to := api.Again(old, m.Status.NewPod, cmp.Or(m.Spec.PullSecret, m.Spec.PushSecret))
	to.Annotations[api.MigrationAnnotation] = string(m.UID)
	s := &to.Spec
	s.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.Gate}}
	if len(m.Spec.NodeSelector) > 0 {
		if s.NodeSelector == nil {
			s.NodeSelector = map[string]string{}
		}
		maps.Copy(s.NodeSelector, m.Spec.NodeSelector)
	}
	if m.Spec.NodeName != "" {
		require(s, corev1.NodeSelectorOpIn, m.Spec.NodeName)
	} else {
		require(s, corev1.NodeSelectorOpNotIn, old.Spec.NodeName)
	}
	return to
}

// require has a pod go to a node, or to any other. A pod that an earlier Migration made gives up
// which node it was to go to.
func require(s *corev1.PodSpec, operator corev1.NodeSelectorOperator, node string) {
	if s.Affinity == nil {
		s.Affinity = &corev1.Affinity{}
	}
	if s.Affinity.NodeAffinity == nil {
		s.Affinity.NodeAffinity = &corev1.NodeAffinity{}
	}
	required := &s.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
	if *required == nil {
		*required = &corev1.NodeSelector{}
	}
	terms := &(*required).NodeSelectorTerms
	if len(*terms) == 0 {
		*terms = []corev1.NodeSelectorTerm{{}}
	}
	for i := range *terms { // one of them has to be met
		(*terms)[i].MatchFields = []corev1.NodeSelectorRequirement{{Key: metav1.ObjectNameField, Operator: operator, Values: []string{node}}}
	}
}
