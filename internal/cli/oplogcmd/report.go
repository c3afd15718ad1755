// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package oplogcmd

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/containerd/containerd/v2/defaults"
	"github.com/docker/go-units"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/internal/cli/oplogcmd/timeline"
	"github.com/gpuckpt/gpuckpt/internal/cli/pods"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// Report is "gpuckpt report".
func Report() *cobra.Command {
	var asJSON, asOTLP bool
	var picture, pod, address, namespace string
	var last int
	c := &cobra.Command{
		Use:   "report [CONTAINER] | --pod POD [CONTAINER...]",
		Short: "Show the last operations of this node, as a list or as a picture",
		Long: `Show the last checkpoints, restores, suspends and resumes of this node, or of a container. It reads the
log that the shims keep in log_dir: when, how long, which step failed and why. --svg draws the
steps of each on an axis of time; a browser shows a step's times and bytes under the pointer. --otlp
prints them as spans for an OpenTelemetry collector.`,
		Example: `  gpuckpt report
  gpuckpt report job --last 1 --svg job.svg`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if last < 1 {
				return fmt.Errorf("--last %d: at least one", last)
			}
			node, err := config.Load()
			if err != nil {
				return err
			}
			found, err := oplog.Read(node.LogDir)
			if err == nil && pod != "" {
				namespace = cmp.Or(namespace, pods.Namespace)
				args, err = pods.Containers(cmd.Context(), address, namespace, pod, args, false)
			}
			if err != nil {
				return err
			}
			found = slices.DeleteFunc(found, func(e oplog.Entry) bool {
				return len(args) > 0 && !slices.Contains(args, e.Container) || namespace != "" && namespace != e.Namespace
			})
			found = append([]oplog.Entry{}, found[max(0, len(found)-last):]...)
			if asOTLP {
				host, err := os.Hostname()
				if err != nil {
					return err
				}
				return json.NewEncoder(cmd.OutOrStdout()).Encode(otlp(found, host))
			}
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(found)
			}
			if picture == "" {
				_, err := io.WriteString(cmd.OutOrStdout(), words(found, time.Now()))
				return err
			}
			if len(found) == 0 {
				return fmt.Errorf("the log of operations in %s has no such operation", node.LogDir)
			}
			var charts []timeline.Chart
			for _, e := range found {
				title := fmt.Sprintf("%s of %s at %s: %s", e.Operation, e.Container, e.Began.Format(time.RFC3339), e.Took.Round(time.Millisecond))
				if e.Failed != "" {
					title += ", failed"
				}
				charts = append(charts, timeline.Chart{Title: title, Phases: e.Phases, Whole: e.Took, Failed: e.Failed})
			}
			return os.WriteFile(picture, timeline.SVG(charts...), 0o644)
		},
	}
	f := c.Flags()
	pods.Flag(c, &pod)
	f.StringVarP(&namespace, "namespace", "n", "", "of this namespace of containerd (default: all, or \"k8s.io\" for a pod)")
	f.StringVarP(&address, "address", "a", cmp.Or(os.Getenv("CONTAINERD_ADDRESS"), defaults.DefaultAddress), "containerd's socket, for --pod ($CONTAINERD_ADDRESS)")
	f.StringVar(&picture, "svg", "", "draw them into this file")
	f.IntVar(&last, "last", 20, "how many, the last ones")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	f.BoolVar(&asOTLP, "otlp", false, "print spans, as a line of OTLP's JSON")
	c.MarkFlagsMutuallyExclusive("json", "otlp", "svg")
	_ = c.MarkFlagFilename("svg", "svg")
	return c
}

func words(found []oplog.Entry, now time.Time) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	fmt.Fprintln(w, "WHEN\tNAMESPACE\tCONTAINER\tOPERATION\tTOOK\tRESULT")
	for _, e := range found {
		result := "done"
		if e.Afresh() {
			result = "started afresh: " + strings.ReplaceAll(e.Error, "\n", " ")
		} else if e.Failed != "" {
			result = e.Failed + " failed: " + strings.ReplaceAll(e.Error, "\n", " ")
		}
		fmt.Fprintf(w, "%s ago\t%s\t%s\t%s\t%s\t%s\n", units.HumanDuration(now.Sub(e.Began)), e.Namespace, e.Container, e.Operation, e.Took.Round(time.Millisecond), result)
	}
	_ = w.Flush() // into memory
	return b.String()
}
