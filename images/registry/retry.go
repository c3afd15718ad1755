// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"

	"github.com/gpuckpt/gpuckpt/images"
)

// attempts calls do until it succeeds, fails for good, or has been tried often enough.
func (o *Options) attempts(ctx context.Context, meter *images.Meter, do func() error) error {
	if err := meter.Moving(); err != nil {
		return err
	}
	pause := o.Pause
	for try := 1; ; try++ {
		err := do()
		if err == nil || ctx.Err() != nil || !transient(err) {
			return err
		}
		if try == o.Attempts {
			if try > 1 {
				err = fmt.Errorf("given up after %d attempts: %w", try, err)
			}
			return finalError{err}
		}
		meter.Note(fmt.Sprintf("trying again: %v", err))
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(apart(pause)):
		}
		pause *= 2
	}
}

// apart returns a pause of that length on average: nodes that a registry has failed at once do not come back at once.
func apart(pause time.Duration) time.Duration { return pause/2 + rand.N(pause) } //nolint:gosec // no secret

// finalError is one that was tried again already, or that no further attempt can mend, as those of this side: the store
// has no room, or not the blob.
type finalError struct{ error }

func (e finalError) Unwrap() error { return e.error }

// transient reports whether the same request may succeed later. Unknown errors may.
func transient(err error) bool {
	if errors.As(err, new(finalError)) || errors.Is(err, docker.ErrInvalidAuthorization) || errors.Is(err, http.ErrSchemeMismatch) || notAuthorized(err) {
		return false
	}
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return status.StatusCode >= 500 || status.StatusCode == http.StatusTooManyRequests || status.StatusCode == http.StatusRequestTimeout
	}
	if dns, ok := errors.AsType[*net.DNSError](err); ok && dns.IsNotFound {
		return false
	}
	switch {
	case errdefs.IsNotFound(err), errdefs.IsInvalidArgument(err), errdefs.IsFailedPrecondition(err),
		errdefs.IsPermissionDenied(err), errdefs.IsUnauthorized(err), errdefs.IsAlreadyExists(err), errdefs.IsResourceExhausted(err):
		return false
	}
	// containerd's daemon hands on the operating system's words alone.
	return !strings.Contains(err.Error(), "no space left on device")
}

func notAuthorized(err error) bool {
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return status.StatusCode == http.StatusUnauthorized || status.StatusCode == http.StatusForbidden
	}
	return errors.Is(err, docker.ErrInvalidAuthorization)
}

func explain(err error, ref string) error {
	host, _, _ := strings.Cut(ref, "/")
	if notAuthorized(err) {
		return fmt.Errorf("%w: correct the push secret of a Checkpoint; else log in with `docker login %s`, or any tool that writes the credentials to $DOCKER_CONFIG/config.json: %w", ErrNotAuthorized, host, err)
	}
	if errors.Is(err, http.ErrSchemeMismatch) {
		return fmt.Errorf("the registry has no TLS: name it as http://%s in containerd's hosts.toml, or use --plain-http: %w", host, err)
	}
	return err
}
