// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package node

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// Resource is what pods ask GPUs by, in their limits.
const Resource = "nvidia.com/gpu"

// shares is how many containers may have one GPU at once, as with the time slicing
// of NVIDIA's device plugin.
const shares = 16

// devicePlugin offers GPUs to the kubelet, and names them to CRI by CDI, as NVIDIA's
// device plugin does with the strategy cdi-cri.
type devicePlugin struct {
	api.UnimplementedDevicePluginServer

	devices []*api.Device
	server  *grpc.Server
}

// startDevicePlugin registers the plugin and returns when the kubelet offers what
// it has.
func (n *Node) startDevicePlugin(ctx context.Context) (*devicePlugin, error) {
	ctx, cancel := context.WithTimeout(ctx, startLimit)
	defer cancel()
	p := &devicePlugin{server: grpc.NewServer()}
	for _, gpu := range n.opts.GPU.Devices {
		for share := range shares {
			p.devices = append(p.devices, &api.Device{ID: fmt.Sprintf("%d-%d", gpu.Index, share), Health: api.Healthy})
		}
	}
	// The kubelet's /var/lib is this directory.
	dir := filepath.Join(n.varLib(), strings.TrimPrefix(api.DevicePluginPath, "/var/lib/"))
	// A kubelet that is healthy may not listen yet, and empties the directory first.
	for {
		if _, err := os.Stat(filepath.Join(dir, "kubelet.sock")); err == nil {
			break
		}
		if err := n.kubelet.pause(ctx, 20*time.Millisecond); err != nil {
			return nil, fmt.Errorf("wait for the kubelet's socket for device plugins: %w", err)
		}
	}
	listener, err := net.Listen("unix", filepath.Join(dir, "gpu.sock"))
	if err != nil {
		return nil, fmt.Errorf("start the device plugin: %w", err)
	}
	api.RegisterDevicePluginServer(p.server, p)
	go func() { _ = p.server.Serve(listener) }() // ends with Stop
	conn, err := grpc.NewClient("unix://"+filepath.Join(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		p.stop()
		return nil, fmt.Errorf("start the device plugin: %w", err)
	}
	defer conn.Close()
	request := &api.RegisterRequest{Version: api.Version, Endpoint: "gpu.sock", ResourceName: Resource}
	if _, err := api.NewRegistrationClient(conn).Register(ctx, request, grpc.WaitForReady(true)); err != nil {
		p.stop()
		return nil, fmt.Errorf("register the device plugin: %w", err)
	}
	if err := n.waitForDevices(ctx, len(p.devices)); err != nil {
		p.stop()
		return nil, err
	}
	return p, nil
}

// waitForDevices waits until the kubelet has taken the plugin's devices down.
func (n *Node) waitForDevices(ctx context.Context, count int) error {
	file := filepath.Join(n.varLib(), "kubelet", "device-plugins", "kubelet_internal_checkpoint")
	for {
		var state struct {
			Data struct{ RegisteredDevices map[string][]string }
		}
		if data, err := os.ReadFile(file); err == nil && json.Unmarshal(data, &state) == nil && len(state.Data.RegisteredDevices[Resource]) == count {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until the kubelet has %d devices: %w", count, context.Cause(ctx))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func (p *devicePlugin) stop() {
	if p != nil {
		p.server.Stop()
	}
}

// GetDevicePluginOptions says that there are preferences.
func (p *devicePlugin) GetDevicePluginOptions(context.Context, *api.Empty) (*api.DevicePluginOptions, error) {
	return &api.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch tells of the devices, which never change.
func (p *devicePlugin) ListAndWatch(_ *api.Empty, stream grpc.ServerStreamingServer[api.ListAndWatchResponse]) error {
	if err := stream.Send(&api.ListAndWatchResponse{Devices: p.devices}); err != nil {
		return err
	}
	<-stream.Context().Done()
	return nil
}

// GetPreferredAllocation fills one GPU after the other, so that pods get the same
// one while it has shares left.
func (p *devicePlugin) GetPreferredAllocation(_ context.Context, r *api.PreferredAllocationRequest) (*api.PreferredAllocationResponse, error) {
	response := &api.PreferredAllocationResponse{}
	for _, container := range r.ContainerRequests {
		offered := map[string]bool{}
		for _, id := range container.AvailableDeviceIDs {
			offered[id] = true
		}
		ids := append([]string{}, container.MustIncludeDeviceIDs...)
		// A container that asks for two GPUs wants two, not two shares.
		for share := 0; share < shares && len(ids) < int(container.AllocationSize); share++ {
			for index := 0; offered[fmt.Sprintf("%d-%d", index, share)] && len(ids) < int(container.AllocationSize); index++ {
				ids = append(ids, fmt.Sprintf("%d-%d", index, share))
			}
		}
		response.ContainerResponses = append(response.ContainerResponses, &api.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// Allocate names the GPUs of each container by CDI.
func (p *devicePlugin) Allocate(_ context.Context, r *api.AllocateRequest) (*api.AllocateResponse, error) {
	response := &api.AllocateResponse{}
	for _, container := range r.ContainerRequests {
		allocated := &api.ContainerAllocateResponse{}
		for _, id := range container.DevicesIds {
			index, _, _ := strings.Cut(id, "-")
			if _, err := strconv.Atoi(index); err != nil {
				return nil, fmt.Errorf("device %q: %w", id, err)
			}
			allocated.CdiDevices = append(allocated.CdiDevices, &api.CDIDevice{Name: harness.CDIKind + "=" + index})
		}
		response.ContainerResponses = append(response.ContainerResponses, allocated)
	}
	return response, nil
}
