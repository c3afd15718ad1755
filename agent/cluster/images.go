// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	corev1 "k8s.io/api/core/v1"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"

	"github.com/gpuckpt/gpuckpt/agent/api"
)

// pruneLimit is how long a registry that does not answer keeps a Checkpoint from going.
const pruneLimit = 10 * time.Minute

// pruneTry is how long an answer is waited for at a time.
var pruneTry = 15 * time.Second

// pruner deletes the images of Checkpoints that go, where they have the finalizer for it.
type pruner struct {
	cluster
	plainHTTP bool
}

// Reconcile is called for each change of a Checkpoint.
func (r *pruner) Reconcile(ctx context.Context, request ctrl.Request) (ctrl.Result, error) {
	var k api.Checkpoint
	if err := r.client.Get(ctx, request.NamespacedName, &k); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if k.DeletionTimestamp == nil || !controllerutil.ContainsFinalizer(&k, api.ImageFinalizer) || k.Status.Phase == api.Running {
		return ctrl.Result{}, nil // an agent at work may push yet
	}
	if err := r.prune(ctx, &k); err != nil {
		refused, answered := errors.AsType[*transport.Error](err)
		_, final := errors.AsType[*api.Failure](err)
		_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
		if temporary := !final && !untrusted && (!answered || refused.StatusCode >= http.StatusInternalServerError || refused.StatusCode == http.StatusTooManyRequests); temporary && r.now().Sub(k.DeletionTimestamp.Time) < pruneLimit {
			return ctrl.Result{}, err
		}
		r.events.Event(&k, corev1.EventTypeWarning, api.ImageKept, api.Text(err.Error()))
	}
	controllerutil.RemoveFinalizer(&k, api.ImageFinalizer)
	return ctrl.Result{}, client.IgnoreNotFound(r.client.Update(ctx, &k))
}

// prune deletes the manifests of a Checkpoint's images. Their blobs are the registry's to collect.
func (r *pruner) prune(ctx context.Context, k *api.Checkpoint) error {
	if len(k.Status.Containers) == 0 { // nothing was pushed
		return nil
	}
	auths, err := r.auths(ctx, k)
	if err != nil {
		return err
	}
	login := authn.Anonymous
	for _, a := range auths { // one
		login = authn.FromConfig(a)
	}
	ctx, cancel := context.WithTimeoutCause(ctx, pruneTry, fmt.Errorf("the registry has not answered within %s", pruneTry))
	defer cancel()
	for _, c := range k.Status.Containers {
		var options []name.Option
		if r.plainHTTP {
			options = append(options, name.Insecure)
		}
		image, err := name.NewDigest(k.Spec.Repository+"@"+c.Digest, options...)
		if err != nil {
			return err
		}
		err = remote.Delete(image, remote.WithAuth(login), remote.WithContext(ctx), remote.WithTransport(deletes{image.Registry.RegistryStr()}))
		if refused, ok := errors.AsType[*transport.Error](err); ok && refused.StatusCode == http.StatusNotFound {
			continue
		}
		if err != nil {
			return fmt.Errorf("delete the image %s: %w", image, cmp.Or(context.Cause(ctx), err))
		}
	}
	return nil
}

// deletes asks a registry. Another host that it names is asked for a token at most, and only outside of
// the controller's own pod and node.
type deletes struct{ registry string }

// elsewhere is for what is not the registry.
var elsewhere = func() *http.Transport {
	t := remote.DefaultTransport.(*http.Transport).Clone() //nolint:forcetypeassert // it is one
	t.DialContext = (&net.Dialer{Timeout: pruneTry, Control: func(_, address string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(address)
		if ip := at.Addr().Unmap(); err != nil || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsUnspecified() || isCloud(ip) {
			return fmt.Errorf("the registry names an address of the controller's own, %s: it is not asked", address)
		}
		return nil
	}}).DialContext
	return t
}()

// isCloud reports whether a cloud answers a machine at an address, with the machine's own credentials among
// others. Most do so at a link-local one; these are Amazon's and Google's of IPv6, Alibaba's, Azure's and
// Oracle's.
func isCloud(ip netip.Addr) bool {
	return slices.Contains([]string{"fd00:ec2::254", "fd20:ce::254", "100.100.100.200", "168.63.129.16", "192.0.0.192"}, ip.WithZone("").String())
}

func (d deletes) RoundTrip(r *http.Request) (*http.Response, error) {
	switch {
	case r.URL.Host == d.registry:
		return remote.DefaultTransport.RoundTrip(r)
	case r.Method == http.MethodDelete:
		return nil, fmt.Errorf("the registry wants the image deleted at another host, %s: that is not asked", r.URL.Host)
	}
	return elsewhere.RoundTrip(r)
}

// auths returns what the Checkpoint's secret has for the repository that it is pushed to: of several entries the one
// with the longest path that has the repository in it. Nothing else of it is read: programs that give credentials
// would run on the node, as root. What no other try would mend is a failure.
func (c cluster) auths(ctx context.Context, k *api.Checkpoint) (map[string]authn.AuthConfig, error) {
	if k.Spec.PushSecret == "" {
		return nil, nil
	}
	repository, err := name.NewRepository(k.Spec.Repository)
	if err != nil {
		return nil, api.Fail(api.NoRepository, "%w", err)
	}
	var secret corev1.Secret
	if err := c.direct.Get(ctx, client.ObjectKey{Namespace: k.Namespace, Name: k.Spec.PushSecret}, &secret); err != nil {
		if !api.Passes(err) {
			err = api.Fail(api.NoSecret, "read the push secret: %w", err)
		}
		return nil, err
	}
	data, ok := secret.Data[corev1.DockerConfigJsonKey]
	if !ok {
		return nil, api.Fail(api.NoSecret, "the push secret %s has the type %s: it must be %s", secret.Name, secret.Type, corev1.SecretTypeDockerConfigJson)
	}
	var config struct {
		Auths map[string]authn.AuthConfig `json:"auths"`
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return nil, api.Fail(api.NoSecret, "read the push secret %s: %w", secret.Name, err)
	}
	asked := repository.RegistryStr() // what a push looks up
	if asked == name.DefaultRegistry {
		asked = authn.DefaultAuthKey
	}
	longest, found := -1, map[string]authn.AuthConfig{}
	for _, key := range slices.Sorted(maps.Keys(config.Auths)) {
		_, rest, ok := strings.Cut(key, "://")
		if !ok {
			rest = key
		}
		host, path, _ := strings.Cut(strings.TrimSuffix(rest, "/"), "/")
		if host == "docker.io" || host == "registry-1.docker.io" {
			host = name.DefaultRegistry
		}
		if path == "v1" || path == "v2" { // of the registry's protocol
			path = ""
		}
		if host == repository.RegistryStr() && strings.HasPrefix(repository.RepositoryStr()+"/", strings.TrimPrefix(path+"/", "/")) && len(path) > longest {
			longest, found = len(path), map[string]authn.AuthConfig{asked: config.Auths[key]}
		}
	}
	return found, nil
}
