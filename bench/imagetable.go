// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"
)

// imageWay names how an image is made.
func imageWay(method, compression string) string {
	if method == stock {
		return "ctr, CUDA steps by hand"
	}
	return "gpuckpt, " + compression
}

// name is the run's for people.
func (r imageRun) name() string {
	return fmt.Sprintf("checkpoint image of %s, %s, round %d", formatSize(r.Size), imageWay(r.Method, r.Compression), r.Round)
}

// name is the run's for people.
func (r registryRun) name() string {
	return fmt.Sprintf("checkpoint image of %s, a registry, round %d", formatSize(r.Size), r.Round)
}

// imageShape is what runs of images have in common.
type imageShape struct {
	size  uint64
	media string
}

// shape returns the run's.
func (o imageOutcome) shape() imageShape { return imageShape{o.Size, o.Media} }

// String names the shape for people: a tmpfs needs no mention.
func (s imageShape) String() string {
	if s.media == "" {
		return formatSize(s.size)
	}
	return formatSize(s.size) + ", " + s.media
}

// imageSizes are the shapes of runs that were verified, the least GPU memory first.
func imageSizes[R any](runs []R, of func(R) imageOutcome) []imageShape {
	var shapes []imageShape
	for _, r := range runs {
		if o := of(r); o.Verified {
			shapes = append(shapes, o.shape())
		}
	}
	slices.SortFunc(shapes, func(a, b imageShape) int {
		return cmp.Or(cmp.Compare(a.media, b.media), cmp.Compare(a.size, b.size))
	})
	return slices.Compact(shapes)
}

func imageTable(runs []imageRun) table {
	t := table{columns: []string{"GPU memory", "method", "runs", "checkpoint", "", "restore", "", "ctr run", "", "stored"}}
	for _, size := range imageSizes(runs, func(r imageRun) imageOutcome { return r.imageOutcome }) {
		of := func(way string, number func(imageRun) float64) spread {
			var values []float64
			for _, r := range runs {
				if r.Verified && r.shape() == size && imageWay(r.Method, r.Compression) == way {
					values = append(values, number(r))
				}
			}
			return spreadOf(values)
		}
		// The stock way has one restore, to be compared with both of ours.
		resume := func(r imageRun) float64 { return cmp.Or(r.Resume, r.Restore) }
		plain := imageWay(ours, "none")
		for _, way := range []string{plain, imageWay(ours, "zstd"), imageWay(stock, "")} {
			check := of(way, func(r imageRun) float64 { return r.Checkpoint })
			if check.N == 0 {
				continue
			}
			cells := []string{size.String(), way, fmt.Sprint(check.N)}
			for _, number := range []func(imageRun) float64{func(r imageRun) float64 { return r.Checkpoint }, func(r imageRun) float64 { return r.Restore }, resume} {
				took := of(way, number)
				cells = append(cells, took.text(), times(took, of(plain, number)))
			}
			t.add(append(cells, roundSize(of(way, func(r imageRun) float64 { return float64(r.Stored) }).Median))...)
		}
	}
	return t
}

// perRegistrySize calls row for each size of verified runs, with what gives the
// spread of a number over them.
func perRegistrySize(runs []registryRun, row func(size imageShape, of func(func(registryRun) float64) spread)) {
	for _, size := range imageSizes(runs, func(r registryRun) imageOutcome { return r.imageOutcome }) {
		row(size, func(number func(registryRun) float64) spread {
			var values []float64
			for _, r := range runs {
				if r.Verified && r.shape() == size {
					values = append(values, number(r))
				}
			}
			return spreadOf(values)
		})
	}
}

func sentTable(runs []registryRun) table {
	t := table{columns: []string{"GPU memory", "layers of", "image", "runs", "made in", "stood still", "new", "reused", "push", "sent", "reused on push"}}
	perRegistrySize(runs, func(size imageShape, of func(func(registryRun) float64) spread) {
		layers := of(func(r registryRun) float64 { return float64(r.LayerBytes) }).Median
		for _, image := range []struct {
			name string
			of   func(registryRun) sentImage
		}{
			{"first", func(r registryRun) sentImage { return r.First }},
			{"second", func(r registryRun) sentImage { return r.Second }},
		} {
			number := func(value func(sentImage) float64) spread {
				return of(func(r registryRun) float64 { return value(image.of(r)) })
			}
			made := number(func(s sentImage) float64 { return s.Checkpoint })
			t.add(size.String(), formatSize(uint64(layers)), image.name, fmt.Sprint(made.N), made.text(),
				number(func(s sentImage) float64 { return s.Paused }).text(),
				roundSize(number(func(s sentImage) float64 { return float64(s.GPUWritten) }).Median),
				percent(number(sentImage.builtShare)),
				number(func(s sentImage) float64 { return s.Push }).text(),
				roundSize(number(func(s sentImage) float64 { return float64(s.Sent) }).Median),
				percent(number(sentImage.pushedShare)))
		}
	})
	return t
}

// percent is the median of a share.
func percent(share spread) string { return fmt.Sprintf("%.1f %%", 100*share.Median) }

func pullTable(runs []registryRun) table {
	t := table{columns: []string{"GPU memory", "runs", "pull", "fetched", "ctr run", "pull beside the first", "fetched", "of all"}}
	perRegistrySize(runs, func(size imageShape, of func(func(registryRun) float64) spread) {
		pull := of(func(r registryRun) float64 { return r.Pull })
		fetched := of(func(r registryRun) float64 { return float64(r.Fetched) }).Median
		again := of(func(r registryRun) float64 { return float64(r.NextFetched) }).Median
		t.add(size.String(), fmt.Sprint(pull.N), pull.text(), roundSize(fetched),
			of(func(r registryRun) float64 { return r.Resume }).text(),
			of(func(r registryRun) float64 { return r.NextPull }).text(), roundSize(again), fmt.Sprintf("%.1f %%", 100*again/max(1, fetched)))
	})
	return t
}

// diskImageTable compares images on a disk with the disk.
func diskImageTable(runs []imageRun, write, read float64) table {
	t := table{columns: []string{"GPU memory", "method", "stored", "checkpoint", "with the flush", "bytes at the disk's rate", "factor", "restore", "bytes read and written", "factor", "ctr run", "bytes read", "factor"}}
	if write == 0 || read == 0 {
		return t
	}
	for _, r := range runs {
		if !r.Verified || r.Media != onDisk || r.Method != ours {
			continue
		}
		stored := float64(r.Stored)
		bound := func(took, least float64) (string, string) { return seconds(least), fmt.Sprintf("%.2f×", took/least) }
		made, madeBy := bound(r.Checkpoint+r.Flush, stored/write)
		unpacked, unpackedBy := bound(r.Restore, stored/read+float64(r.Size)/write)
		run, runBy := bound(r.Resume, float64(r.Size)/read)
		t.add(r.shape().String(), imageWay(r.Method, r.Compression), roundSize(stored), seconds(r.Checkpoint), seconds(r.Checkpoint+r.Flush), made, madeBy,
			seconds(r.Restore), unpacked, unpackedBy, seconds(r.Resume), run, runBy)
	}
	return t
}
