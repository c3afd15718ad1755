// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package report

import (
	"cmp"
	"fmt"
	"slices"
)

// ImageWay names how an image is made.
func ImageWay(method, compression string) string {
	if method == Stock {
		return "ctr, CUDA steps by hand"
	}
	return "gpuckpt, " + compression
}

// Name is the run's for people.
func (r ImageRun) Name() string {
	return fmt.Sprintf("checkpoint image of %s, %s, round %d", r.shape(), ImageWay(r.Method, r.Compression), r.Round)
}

// Name is the run's for people.
func (r RegistryRun) Name() string {
	return fmt.Sprintf("checkpoint image of %s, a registry, round %d", r.shape(), r.Round)
}

// imageShape is what runs of images have in common.
type imageShape struct {
	size, host uint64
	media      string
}

// shape returns the run's.
func (o ImageOutcome) shape() imageShape { return imageShape{o.Size, o.Host, o.Media} }

// String names the shape for people: a tmpfs needs no mention.
func (s imageShape) String() string {
	text := FormatSize(s.size)
	if s.host > 0 {
		text += " and " + FormatSize(s.host) + " of host memory"
	}
	if s.media != "" {
		text += ", " + s.media
	}
	return text
}

// imageSizes are the shapes of runs that were verified, the least GPU memory first.
func imageSizes[R any](runs []R, of func(R) ImageOutcome) []imageShape {
	var shapes []imageShape
	for _, r := range runs {
		if o := of(r); o.Verified {
			shapes = append(shapes, o.shape())
		}
	}
	slices.SortFunc(shapes, func(a, b imageShape) int {
		return cmp.Or(cmp.Compare(a.media, b.media), cmp.Compare(a.size, b.size), cmp.Compare(a.host, b.host))
	})
	return slices.Compact(shapes)
}

func imageTable(runs []ImageRun) table {
	t := table{columns: []string{"GPU memory", "method", "runs", "checkpoint", "", "restore", "", "ctr run", "", "stored"}}
	for _, size := range imageSizes(runs, func(r ImageRun) ImageOutcome { return r.ImageOutcome }) {
		of := func(way string, number func(ImageRun) float64) spread {
			var values []float64
			for _, r := range runs {
				if r.Verified && r.shape() == size && ImageWay(r.Method, r.Compression) == way {
					values = append(values, number(r))
				}
			}
			return spreadOf(values)
		}
		// The stock way has one restore, to be compared with both of ours.
		resume := func(r ImageRun) float64 { return cmp.Or(r.Resume, r.Restore) }
		plain := ImageWay(Ours, "none")
		for _, way := range []string{plain, ImageWay(Ours, "zstd"), ImageWay(Stock, "")} {
			check := of(way, func(r ImageRun) float64 { return r.Checkpoint })
			if check.N == 0 {
				continue
			}
			cells := []string{size.String(), way, fmt.Sprint(check.N)}
			for _, number := range []func(ImageRun) float64{func(r ImageRun) float64 { return r.Checkpoint }, func(r ImageRun) float64 { return r.Restore }, resume} {
				took := of(way, number)
				cells = append(cells, took.text(), times(took, of(plain, number)))
			}
			t.add(append(cells, RoundSize(of(way, func(r ImageRun) float64 { return float64(r.Stored) }).Median))...)
		}
	}
	return t
}

// perRegistrySize calls row for each size of verified runs, with what gives the
// spread of a number over them.
func perRegistrySize(runs []RegistryRun, row func(size imageShape, of func(func(RegistryRun) float64) spread)) {
	for _, size := range imageSizes(runs, func(r RegistryRun) ImageOutcome { return r.ImageOutcome }) {
		row(size, func(number func(RegistryRun) float64) spread {
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

func sentTable(runs []RegistryRun) table {
	t := table{columns: []string{"GPU memory", "layers of", "image", "runs", "made in", "stood still", "new", "reused", "push", "sent", "reused on push"}}
	perRegistrySize(runs, func(size imageShape, of func(func(RegistryRun) float64) spread) {
		layers := of(func(r RegistryRun) float64 { return float64(r.LayerBytes) }).Median
		for _, image := range []struct {
			name string
			of   func(RegistryRun) SentImage
		}{
			{"first", func(r RegistryRun) SentImage { return r.First }},
			{"second", func(r RegistryRun) SentImage { return r.Second }},
		} {
			number := func(value func(SentImage) float64) spread {
				return of(func(r RegistryRun) float64 { return value(image.of(r)) })
			}
			made := number(func(s SentImage) float64 { return s.Checkpoint })
			t.add(size.String(), FormatSize(uint64(layers)), image.name, fmt.Sprint(made.N), made.text(),
				number(func(s SentImage) float64 { return s.Paused }).text(),
				RoundSize(number(func(s SentImage) float64 { return float64(s.GPUWritten) }).Median),
				percent(number(SentImage.builtShare)),
				number(func(s SentImage) float64 { return s.Push }).text(),
				RoundSize(number(func(s SentImage) float64 { return float64(s.Sent) }).Median),
				percent(number(SentImage.PushedShare)))
		}
	})
	return t
}

// percent is the median of a share.
func percent(share spread) string { return fmt.Sprintf("%.1f %%", 100*share.Median) }

func pullTable(runs []RegistryRun) table {
	t := table{columns: []string{"GPU memory", "runs", "pull", "fetched", "ctr run", "pull beside the first", "fetched", "of all"}}
	perRegistrySize(runs, func(size imageShape, of func(func(RegistryRun) float64) spread) {
		pull := of(func(r RegistryRun) float64 { return r.Pull })
		fetched := of(func(r RegistryRun) float64 { return float64(r.Fetched) }).Median
		again := of(func(r RegistryRun) float64 { return float64(r.NextFetched) }).Median
		t.add(size.String(), fmt.Sprint(pull.N), pull.text(), RoundSize(fetched),
			of(func(r RegistryRun) float64 { return r.Resume }).text(),
			of(func(r RegistryRun) float64 { return r.NextPull }).text(), RoundSize(again), fmt.Sprintf("%.1f %%", 100*again/max(1, fetched)))
	})
	return t
}

// diskImageTable compares images on a disk with the disk.
func diskImageTable(runs []ImageRun, write, read float64) table {
	t := table{columns: []string{"GPU memory", "method", "stored", "checkpoint", "with the flush", "bytes at the disk's rate", "factor", "restore", "bytes read and written", "factor", "ctr run", "bytes read", "factor"}}
	if write == 0 || read == 0 {
		return t
	}
	for _, r := range runs {
		if !r.Verified || r.Media != OnDisk || r.Method != Ours {
			continue
		}
		stored := float64(r.Stored)
		bound := func(took, least float64) (string, string) { return Seconds(least), fmt.Sprintf("%.2f×", took/least) }
		made, madeBy := bound(r.Checkpoint+r.Flush, stored/write)
		unpacked, unpackedBy := bound(r.Restore, stored/read+float64(r.Size)/write)
		run, runBy := bound(r.Resume, float64(r.Size)/read)
		t.add(r.shape().String(), ImageWay(r.Method, r.Compression), RoundSize(stored), Seconds(r.Checkpoint), Seconds(r.Checkpoint+r.Flush), made, madeBy,
			Seconds(r.Restore), unpacked, unpackedBy, Seconds(r.Resume), run, runBy)
	}
	return t
}
