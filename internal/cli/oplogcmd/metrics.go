// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package oplogcmd is the commands of gpuckpt that show the log of operations: metrics and report.
package oplogcmd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/defaults"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/common/expfmt"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/internal/cli/oplogcmd/internal/metrics"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// Metrics is "gpuckpt metrics".
func Metrics() *cobra.Command {
	var listen, state string
	c := &cobra.Command{
		Use:   "metrics",
		Short: "Print or serve metrics of this node's checkpoints for Prometheus",
		Long: `Print or serve metrics of this node's checkpoints for Prometheus: operations, failures by step,
durations by phase, bytes, suspended containers and GPUs.

The shims write each operation into a log, operations.jsonl in log_dir. Without --listen the
command prints what the log of operations has and ends; with it, it counts from its start on.`,
		Example: `  gpuckpt metrics --listen :9402
  gpuckpt metrics > /var/lib/node_exporter/gpuckpt.prom`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			node, err := config.Load()
			if err != nil {
				return err
			}
			numbers, registry := metrics.New(state), prometheus.NewRegistry()
			if err := registry.Register(numbers); err != nil {
				return err
			}
			if listen != "" {
				return serveMetrics(cmd.Context(), listen, node.LogDir, numbers, registry)
			}
			entries, err := oplog.Read(node.LogDir)
			if err != nil {
				return err
			}
			numbers.Add(entries)
			families, err := registry.Gather()
			for _, f := range families {
				if err == nil {
					_, err = expfmt.MetricFamilyToText(cmd.OutOrStdout(), f)
				}
			}
			return err
		},
	}
	c.Flags().StringVar(&listen, "listen", "", "serve /metrics at this address, such as :9402")
	c.Flags().StringVar(&state, "state", defaults.DefaultStateDir, "containerd's directory of state")
	_ = c.MarkFlagDirname("state")
	return c
}

// serveMetrics serves until the context ends.
func serveMetrics(ctx context.Context, address, logs string, numbers *metrics.Collector, registry *prometheus.Registry) error {
	tail, err := oplog.NewTail(logs)
	if err != nil {
		return err
	}
	defer tail.Close()
	var one sync.Mutex
	handler := promhttp.HandlerFor(registry, promhttp.HandlerOpts{})
	server := http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/metrics" {
			http.NotFound(w, r)
			return
		}
		one.Lock()
		entries, err := tail.Next()
		numbers.Add(entries)
		one.Unlock()
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		handler.ServeHTTP(w, r)
	})}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("serve metrics: %w", err)
	}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}
