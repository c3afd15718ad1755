// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
)

// CDIKind is the kind of device that WriteCDISpec describes, as NVIDIA's container
// toolkit names it.
const CDIKind = "nvidia.com/gpu"

// The part of a specification of the Container Device Interface that GPUs need
// (tags.cncf.io/container-device-interface, SPEC.md).
type (
	cdiSpec struct {
		Version        string    `json:"cdiVersion"`
		Kind           string    `json:"kind"`
		Devices        []cdiItem `json:"devices"`
		ContainerEdits cdiEdits  `json:"containerEdits"`
	}
	cdiItem struct {
		Name           string   `json:"name"`
		ContainerEdits cdiEdits `json:"containerEdits"`
	}
	cdiEdits struct {
		Env         []string   `json:"env,omitempty"`
		DeviceNodes []cdiNode  `json:"deviceNodes,omitempty"`
		Mounts      []cdiMount `json:"mounts,omitempty"`
	}
	cdiNode struct {
		Path        string `json:"path"`
		Type        string `json:"type"`
		Major       int64  `json:"major"`
		Minor       int64  `json:"minor"`
		FileMode    int    `json:"fileMode"`
		Permissions string `json:"permissions"`
	}
	cdiMount struct {
		HostPath      string   `json:"hostPath"`
		ContainerPath string   `json:"containerPath"`
		Options       []string `json:"options"`
	}
)

// WriteCDISpec writes a CDI specification of the instance's GPUs into a directory,
// for clients that ask for devices by name: CDIKind, "=", the GPU's index or "all".
func (c *Containerd) WriteCDISpec(dir string) error {
	g := c.opts.GPU
	spec := cdiSpec{Version: "0.6.0", Kind: CDIKind, ContainerEdits: cdiEdits{Env: g.containerEnv()}}
	for _, node := range g.shared {
		spec.ContainerEdits.DeviceNodes = append(spec.ContainerEdits.DeviceNodes, cdiNodeOf(node))
	}
	for _, m := range g.mounts() {
		spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts, cdiMount{m.Source, m.Destination, m.Options})
	}
	if g.Kind == SoftwareGPU {
		spec.ContainerEdits.Mounts = append(spec.ContainerEdits.Mounts,
			cdiMount{c.softwareConfig(), "/etc/softcuda.conf", []string{"rbind", "ro", "rprivate"}})
	}
	all := cdiItem{Name: "all"}
	for _, device := range g.Devices {
		node := cdiNodeOf(device.node)
		spec.Devices = append(spec.Devices, cdiItem{strconv.Itoa(device.Index), cdiEdits{DeviceNodes: []cdiNode{node}}})
		all.ContainerEdits.DeviceNodes = append(all.ContainerEdits.DeviceNodes, node)
	}
	spec.Devices = append(spec.Devices, all)
	data, err := json.MarshalIndent(spec, "", "  ")
	if err == nil {
		err = os.MkdirAll(dir, 0o755)
	}
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "nvidia.json"), data, 0o644)
	}
	if err != nil {
		return fmt.Errorf("write the CDI specification: %w", err)
	}
	return nil
}

func cdiNodeOf(node deviceNode) cdiNode {
	return cdiNode{Path: node.path, Type: "c", Major: node.major, Minor: node.minor, FileMode: 0o666, Permissions: "rwm"}
}
