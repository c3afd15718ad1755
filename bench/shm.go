// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// shmFile is a file of random bytes in a container's /dev/shm.
type shmFile struct {
	k      *harness.Container
	bytes  uint64
	digest [sha256.Size]byte
}

// fillShm makes a file of so many bytes in a workload's /dev/shm; nil for none.
func fillShm(ctx context.Context, s subject, bytes uint64) (*shmFile, error) {
	if bytes == 0 {
		return nil, nil
	}
	c, ok := s.(*containerSubject)
	if !ok {
		return nil, errors.New("this method has no container with a /dev/shm")
	}
	f := &shmFile{k: c.k, bytes: bytes}
	name, err := f.path(ctx)
	if err != nil {
		return nil, err
	}
	out, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	h := sha256.New()
	random := rand.NewChaCha8([32]byte{})
	if _, err := io.CopyN(io.MultiWriter(out, h), random, int64(bytes)); err != nil {
		return nil, fmt.Errorf("fill /dev/shm: %w", err)
	}
	f.digest = [sha256.Size]byte(h.Sum(nil))
	return f, nil
}

// path returns the host's path of the file.
func (f *shmFile) path(ctx context.Context) (string, error) {
	pid, err := f.k.Pid(ctx)
	return fmt.Sprintf("/proc/%d/root/dev/shm/bench", pid), err
}

// verify returns an error if the file is not as it was.
func (f *shmFile) verify(ctx context.Context) error {
	if f == nil {
		return nil
	}
	name, err := f.path(ctx)
	if err != nil {
		return err
	}
	in, err := os.Open(name)
	if err != nil {
		return err
	}
	defer in.Close()
	h := sha256.New()
	n, err := io.Copy(h, in)
	if err != nil {
		return err
	}
	if uint64(n) != f.bytes || [sha256.Size]byte(h.Sum(nil)) != f.digest {
		return fmt.Errorf("%s is not as it was: %d bytes, %d before", name, n, f.bytes)
	}
	return nil
}
