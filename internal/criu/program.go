// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package criu

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/go-runc"
	"github.com/containerd/log"
	"github.com/moby/sys/atomicwriter"
	"golang.org/x/mod/semver"
	"golang.org/x/sys/unix"
)

// Minimum is the oldest CRIU that dumps what a CUDA process has open.
const Minimum = "4.2"

// remedy is what to do without a CRIU that is new enough.
const remedy = "install CRIU " + Minimum + " or newer, or name it in [criu] path of /etc/gpuckpt/config.toml"

// A Runner finds and runs programs in the environment of shims.
type Runner interface {
	// Look returns the path of a program in $PATH.
	Look(name string) (path string, err error)
	// Run runs a program and returns its outputs. A status other than 0 is an error.
	Run(ctx context.Context, program string, args ...string) (stdout, stderr string, err error)
}

// Shim is the Runner within a shim, which reaps all of its children in one place.
type Shim struct{}

// Look returns the path of a program in the shim's $PATH.
func (Shim) Look(name string) (string, error) { return exec.LookPath(name) }

// Run runs a program as a child of the shim.
func (Shim) Run(ctx context.Context, program string, args ...string) (stdout, stderr string, err error) {
	var out, errs bytes.Buffer
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Stdout, cmd.Stderr = &out, &errs
	exits, err := runc.Monitor.Start(cmd)
	if err != nil {
		return "", "", err
	}
	status, err := runc.Monitor.Wait(cmd, exits)
	if err == nil && status != 0 {
		err = fmt.Errorf("%s: exit status %d", strings.Join(append([]string{program}, args...), " "), status)
	}
	return out.String(), errs.String(), err
}

// Find returns the criu that runc is to run: the configured one, which must be
// there, or else the first in $PATH.
func Find(r Runner, configured string) (path string, err error) {
	if configured == "" {
		if path, err = r.Look("criu"); err != nil {
			return "", errors.New("no criu in $PATH")
		}
		return path, nil
	}
	if _, err := os.Stat(configured); err != nil { // runc would take the next one in $PATH
		return "", fmt.Errorf("[criu] path: %w", err)
	}
	return configured, nil
}

// WithPath returns a context with which runc finds the configured criu, and criu finds programs in
// first before any other place. runc looks for criu in its $PATH and nowhere else.
func WithPath(ctx context.Context, configured, first string) context.Context {
	dirs := []string{os.Getenv("PATH")}
	if configured != "" {
		dirs = slices.Insert(dirs, 0, filepath.Dir(configured))
	}
	if first != "" {
		dirs = slices.Insert(dirs, 0, first)
	}
	if len(dirs) == 1 {
		return ctx
	}
	return runc.WithExtraEnv(ctx, "PATH="+strings.Join(dirs, string(os.PathListSeparator)))
}

// Version asks a criu for its version, "4.2.1".
func Version(ctx context.Context, r Runner, path string) (string, error) {
	out, stderr, err := r.Run(ctx, path, "--version")
	if err != nil {
		if line, _, _ := strings.Cut(strings.TrimSpace(stderr), "\n"); line != "" {
			err = fmt.Errorf("%s: %w", line, err)
		}
		return "", fmt.Errorf("%s does not run: %w", path, err)
	}
	for line := range strings.Lines(out) {
		if v, ok := strings.CutPrefix(line, "Version:"); ok {
			return strings.TrimSpace(v), nil
		}
	}
	return "", fmt.Errorf("%s does not run: no version in %q", path, out)
}

// TooOld reports whether a version is older than Minimum. One that is not made of
// numbers is not.
func TooOld(version string) bool {
	is := semver.MajorMinor("v" + version)
	return is != "" && semver.Compare(is, "v"+Minimum) < 0
}

// Check refuses a node without CRIU, or with one that is too old.
func Check(ctx context.Context, r Runner, configured string) error {
	path, err := Find(r, configured)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", err, remedy, errdefs.ErrFailedPrecondition)
	}
	version, err := Version(ctx, r, path)
	if err != nil {
		return err
	}
	if TooOld(version) {
		return fmt.Errorf("%s is version %s, too old: %s: %w", path, version, remedy, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// goodCRIU keeps for other shims which criu was found good: starting one takes as long as reading all images of a
// small dump.
const goodCRIU = "/run/gpuckpt/criu"

// CheckOnce is Check that asks a criu once.
func CheckOnce(ctx context.Context, r Runner, configured string) error {
	return checkOnce(ctx, r, configured, goodCRIU)
}

func checkOnce(ctx context.Context, r Runner, configured, cache string) error {
	path, _ := Find(r, configured) // Check says why there is none
	_, err := once(ctx, path, cache, func() (string, error) { return "", Check(ctx, r, configured) })
	return err
}

// once returns what ask has found out about a criu. The node remembers it in a file that is gone with the next boot, until the
// criu is another or has changed.
func once(ctx context.Context, criu, cache string, ask func() (string, error)) (string, error) {
	var is unix.Stat_t
	if unix.Stat(criu, &is) != nil {
		return ask()
	}
	is.Atim = unix.Timespec{} // of its reads
	key := fmt.Sprint(criu, is, " ")
	if known, err := os.ReadFile(cache); err == nil && strings.HasPrefix(string(known), key) {
		return string(known[len(key):]), nil
	}
	answer, err := ask()
	if err == nil {
		remember(ctx, cache, key+answer)
	}
	return answer, err
}

// remember keeps an answer for other shims. Without it the next one asks again.
func remember(ctx context.Context, cache, answer string) {
	err := os.MkdirAll(filepath.Dir(cache), 0o700)
	if err == nil {
		err = atomicwriter.WriteFile(cache, []byte(answer), 0o600)
	}
	if err != nil {
		log.G(ctx).WithError(err).Debug("keep what CRIU can do")
	}
}
