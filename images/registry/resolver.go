// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/google/go-containerregistry/pkg/authn"
)

// newResolver makes containerd's resolver of options that have their defaults.
func newResolver(ctx context.Context, o Options) remotes.Resolver {
	hosts := config.HostOptions{
		HostDir:     config.HostDirFromRoot(o.HostsDir),
		Credentials: o.Credentials,
	}
	if o.PlainHTTP {
		hosts.DefaultScheme = "http"
	}
	return docker.NewResolver(docker.ResolverOptions{
		Hosts:   guarded(config.ConfigureHosts(ctx, hosts)),
		Tracker: docker.NewInMemoryTracker(),
	})
}

// DockerCredentials looks a host up in the user's Docker configuration (config.json in
// $DOCKER_CONFIG or ~/.docker, Podman's auth.json), with its credential helpers.
func DockerCredentials(host string) (user, secret string, err error) {
	var found *authn.AuthConfig
	auth, err := authn.DefaultKeychain.Resolve(registryHost(host))
	if err == nil {
		found, err = auth.Authorization()
	}
	if err != nil {
		return "", "", fmt.Errorf("look up the credentials for %s: %w", host, err)
	}
	if found.IdentityToken != "" {
		return "", found.IdentityToken, nil
	}
	return found.Username, found.Password, nil
}

// registryHost is a host as the keychain asks for it.
type registryHost string

func (h registryHost) String() string { return h.RegistryStr() }

func (h registryHost) RegistryStr() string {
	// The host that serves docker.io is not the one that docker login writes down.
	if h == "registry-1.docker.io" {
		return "index.docker.io"
	}
	return string(h)
}
