// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/convert"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/internal/cli/doctor"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

func openPlace(ctx context.Context, dial convert.Dial, name string) (*convert.Source, error) {
	ref, err := convert.ParseRef(name)
	if err != nil {
		return nil, err
	}
	return convert.Open(ctx, ref, dial)
}

type inspectAnswer struct {
	Source string `json:"source"`
	// Image is what a checkpoint image says of itself, Metadata the gpuckpt.json of another source.
	Image    *oci.Image       `json:"image,omitempty"`
	Metadata *images.Metadata `json:"metadata,omitempty"`
	// Files are those of a source that is not an image, without the areas.
	Files []inspectFile `json:"files,omitempty"`
}

type inspectFile struct {
	Name  string `json:"name"`
	Bytes uint64 `json:"bytes"`
}

func inspectCommand() *cobra.Command {
	var d daemon
	c := &cobra.Command{
		Use:   "inspect PLACE",
		Short: "Show what a checkpoint holds: GPUs, processes, sizes, times",
		Long: `Show what a checkpoint holds: GPUs, processes, sizes, times. Nothing is verified.

` + places,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return d.run(cmd, func(ctx context.Context, dial convert.Dial, _ images.Progress) (any, string, error) {
				answer, err := inspect(ctx, dial, args[0])
				if err != nil {
					return nil, "", err
				}
				return answer, answer.words(), nil
			})
		},
	}
	c.ValidArgsFunction = first(d.images)
	d.flags(c)
	return c
}

func inspect(ctx context.Context, dial convert.Dial, name string) (_ *inspectAnswer, err error) {
	s, err := openPlace(ctx, dial, name)
	if err != nil {
		return nil, err
	}
	defer joinClose(&err, s)
	answer := &inspectAnswer{Source: s.Ref.String()}
	if s.Image != nil {
		if answer.Image, err = oci.Inspect(ctx, s.Provider, *s.Image); err != nil {
			return nil, fmt.Errorf("inspect %s: %w", name, err)
		}
		return answer, nil
	}
	c := s.Checkpoint
	answer.Metadata = c.Metadata
	for _, f := range c.Files {
		answer.Files = append(answer.Files, inspectFile{f.Name, f.Bytes})
	}
	return answer, nil
}

func (a *inspectAnswer) words() string {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 8, 2, ' ', 0)
	row := func(name, format string, args ...any) {
		fmt.Fprintf(w, "%s\t%s\n", visible.Text(name), visible.Text(fmt.Sprintf(format, args...)))
	}
	row("Checkpoint", "%s", a.Source)
	m := cmp.Or(a.Metadata, new(images.Metadata))
	if a.Image != nil {
		m = a.Image.Metadata
		row("Digest", "%s", a.Image.Digest)
		if a.Image.BaseName != "" {
			row("Base image", "%s", a.Image.BaseName)
		}
		if name := a.Image.Annotations[annotations.ContainerName]; name != "" {
			row("Container", "%s", name)
		}
	}
	if len(m.Processes) == 0 {
		row("GPU state", "none")
	}
	if !m.Created.IsZero() {
		row("Created", "%s", m.Created.Format(time.RFC3339))
	}
	if len(m.Processes) > 0 {
		row("Driver", "%s, CUDA %s", m.DriverVersion, m.CUDAVersion)
		for _, g := range m.GPUs {
			row(fmt.Sprintf("GPU %d", g.Index), "%s, %s, %s", g.Name, size(g.Memory), g.UUID)
		}
		for _, p := range m.Processes {
			where := "in CRIU's images"
			if len(p.Areas) > 0 {
				where = "in files of its own"
			}
			row(fmt.Sprintf("Process %d", p.PID), "%s, %s of GPU state %s, on %s", p.State, size(p.Bytes), where, strings.Join(p.GPUs, " "))
		}
	}
	a.sizes(row)
	for _, ph := range m.Phases {
		moved := ""
		if ph.Bytes > 0 {
			moved = ", " + size(ph.Bytes)
		}
		row("Step "+ph.Name, "%s%s", ph.Took.Round(time.Millisecond/10), moved)
	}
	_ = w.Flush() // into memory
	return text.String()
}

func (a *inspectAnswer) sizes(row func(string, string, ...any)) {
	if a.Image == nil {
		var bytes uint64
		for _, f := range a.Files {
			bytes += f.Bytes
		}
		row("CRIU's images", "%s in %d files", size(bytes), len(a.Files))
		return
	}
	of := make(map[string]int)
	for _, l := range a.Image.Layers {
		of[l.Kind]++
	}
	for _, kind := range []struct{ key, name string }{
		{oci.LayerBase, "Base layers"}, {oci.LayerRW, "Writable files"}, {oci.LayerMemory, "Memory stored"}, {oci.LayerGPU, "GPU state stored"}, {oci.LayerCRIU, "CRIU's images"},
	} {
		if n := of[kind.key]; n > 0 {
			parts := doctor.Count(n, "layer")
			if kind.key == oci.LayerGPU || kind.key == oci.LayerMemory {
				parts = doctor.Count(n, "piece") + " of up to " + size(a.Image.LayerBytes)
			}
			row(kind.name, "%s in %s", size(a.Image.Bytes(kind.key)), parts)
		}
	}
}
