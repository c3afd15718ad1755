// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// manCommand is for whoever packs the program.
func manCommand() *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Short: "Write a man page for each command", Hidden: true, Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			date := version.Time()
			header := doc.GenManHeader{Section: "1", Source: "gpuckpt " + version.Short(), Manual: "gpuckpt", Date: &date}
			cmd.Root().DisableAutoGenTag = true
			return doc.GenManTree(cmd.Root(), &header, args[0])
		},
	}
}

func versionCommand() *cobra.Command {
	var asJSON bool
	c := &cobra.Command{
		Use:   "version",
		Short: "Print the version, the commit and its date",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if asJSON {
				return json.NewEncoder(cmd.OutOrStdout()).Encode(version.Of())
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "gpuckpt %s\n", version.String())
			return err
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return c
}
