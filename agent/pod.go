// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/gpuckpt/gpuckpt/agent/api"
	"github.com/gpuckpt/gpuckpt/agent/node"
)

// pod takes the containers of a pod from the checkpoint, in one cut, to the registry. The kubelet
// would checkpoint one after the other, so the node's gpuckpt does it. names are those that ran when
// the pod was read.
func (c *controller) pod(ctx context.Context, k *api.Checkpoint, image string, names []string, credentials []byte) error {
	seconds := func(s float64) metav1.Duration {
		return metav1.Duration{Duration: time.Duration(s * float64(time.Second)).Round(time.Millisecond)}
	}
	made, err := c.work.CheckpointPod(ctx, k.Namespace, k.Spec.Pod, image, k.Spec.TimeoutSeconds)
	if err != nil {
		return failure{"CheckpointFailed", err}
	}
	err = lacks(made, names)
	each := err == nil && ends(k) // is sent by itself: whichever arrives is not lost
	for _, m := range made {
		if err != nil && !each {
			err = errors.Join(err, c.work.Discard(context.WithoutCancel(ctx), m.Image))
			continue
		}
		began := c.now()
		done := api.Container{Name: m.Name, Image: m.Image, Digest: m.Digest, Bytes: m.Bytes, GPUBytes: m.GPUBytes, Checkpoint: seconds(m.PausedSeconds), Build: seconds(m.BuildSeconds)}
		sent, perr := c.push(ctx, k, m.Image, credentials)
		if perr != nil {
			err = errors.Join(err, failure{"PushFailed", fmt.Errorf("container %s: %w", m.Name, perr)})
			continue
		}
		done.Pushed = sent
		done.Push = metav1.Duration{Duration: c.now().Sub(began).Round(time.Millisecond)}
		k.Status.Containers = append(k.Status.Containers, done)
	}
	return err
}

// lacks refuses a cut without a container that ran: it has ended since.
func lacks(made []node.Captured, names []string) error {
	for _, name := range names {
		if !slices.ContainsFunc(made, func(m node.Captured) bool { return m.Name == name }) {
			return failure{"CheckpointFailed", fmt.Errorf("container %s has ended before the checkpoint", name)}
		}
	}
	return nil
}
