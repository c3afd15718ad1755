// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Command gpuckpt is the operator's command line. Each sub-command is a file. Under the name
// cuda-checkpoint it is a stand-in for NVIDIA's utility, see internal/cli/cudatool/utility.go.
package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/spf13/cobra"

	"github.com/gpuckpt/gpuckpt/internal/cli/cudatool"
	"github.com/gpuckpt/gpuckpt/internal/cli/installcmd"
	"github.com/gpuckpt/gpuckpt/internal/cli/oplogcmd"
	"github.com/gpuckpt/gpuckpt/internal/cli/recovercmd"
	"github.com/gpuckpt/gpuckpt/internal/node/version"
	"github.com/gpuckpt/gpuckpt/internal/node/visible"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second Ctrl-C ends the program at once
	os.Exit(run(ctx, os.Args))
}

// run returns the exit status.
func run(ctx context.Context, args []string) int {
	stdout, stderr := visible.Writer(os.Stdout), visible.Writer(os.Stderr)
	if len(args) > 0 && filepath.Base(args[0]) == "cuda-checkpoint" {
		return cudatool.Utility(ctx, args[1:], stdout, stderr)
	}
	root := rootCommand()
	root.SetArgs(args[1:])
	root.SetOut(stdout)
	root.SetErr(stderr)
	log.L.Logger.SetOutput(stderr)
	called := false
	root.PersistentPreRunE = func(c *cobra.Command, _ []string) error {
		level, _ := c.Flags().GetString(logLevel) // rootCommand has it
		if log.SetLevel(level) != nil {
			return fmt.Errorf("--%s %s: it must be trace, debug, info, warn or error", logLevel, level)
		}
		err := cmp.Or(c.ValidateRequiredFlags(), c.ValidateFlagGroups()) // cobra does these only after this
		called = err == nil
		return err
	}
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return 0
	}
	message, help := dedupLines(interrupted(ctx, err.Error()))+needsRoot(err, os.Geteuid()), ""
	if !called {
		help = command.CommandPath() + " --help"
	}
	if f := command.Flags().Lookup("json"); f != nil && f.Value.String() == "true" || slices.Contains(args, "--json") {
		_ = json.NewEncoder(stderr).Encode(failure{visible.Text(message), help}) // there is no better place
		return 1
	}
	fmt.Fprintf(stderr, "gpuckpt: %s\n", message)
	if help != "" {
		fmt.Fprintf(stderr, "See '%s'.\n", help)
	}
	return 1
}

// interrupted has the text of an error say that somebody has pressed Ctrl-C, in place of Go's words for that.
func interrupted(ctx context.Context, text string) string {
	if ctx.Err() == nil {
		return text
	}
	return strings.NewReplacer(context.Canceled.Error(), "interrupted", context.Cause(ctx).Error(), "interrupted").Replace(text)
}

// needsRoot says what to do about what the system refuses to another user than root.
func needsRoot(err error, uid int) string {
	if uid != 0 && errors.Is(err, fs.ErrPermission) {
		return ": run gpuckpt as root"
	}
	return ""
}

// failure is an error as JSON.
type failure struct {
	Error string `json:"error"`
	// Help is the command that says how the failed one is called, where it was called wrongly.
	Help string `json:"help,omitempty"`
}

// dedupLines leaves out lines that an earlier part of the text has: an error that comes from
// containerd names its kind in its words, and again for each hand it went through. Of a precondition that has
// failed the words before the kind say all.
func dedupLines(text string) string {
	kind := errdefs.ErrFailedPrecondition.Error()
	var lines []string
	for line := range strings.SplitSeq(text, "\n") {
		for strings.HasSuffix(line, ": "+kind) {
			line = strings.TrimSuffix(line, ": "+kind)
		}
		if line != kind && !strings.Contains(strings.Join(lines, "\n"), line) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "\n")
}

// logLevel is the flag for how much is logged.
const logLevel = "log-level"

// group completes a command that only has sub-commands.
func group(c *cobra.Command, subs ...*cobra.Command) *cobra.Command {
	c.Args = cobra.NoArgs // so that an unknown sub-command is an error
	c.RunE = func(cmd *cobra.Command, _ []string) error { return cmd.Help() }
	c.AddCommand(subs...)
	return c
}

// rootCommand puts the sub-commands together.
//
//nolint:contextcheck // commands take the context that cobra runs them with
func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "gpuckpt",
		Short: "Checkpoint and restore GPU containers",
		Long: `Checkpoint and restore GPU containers.

Run a container with containerd's runtime ` + runtimeName + `,
by any client, and it can be checkpointed. "gpuckpt doctor" checks whether this node
can do it.`,
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	// Files are offered where a command takes some, see the flags and arguments.
	root.CompletionOptions.SetDefaultShellCompDirective(cobra.ShellCompDirectiveNoFileComp)
	for _, group := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Containers:", []*cobra.Command{checkpointCommand(), restoreCommand(), suspendCommand(), resumeCommand(), psCommand()}},
		{"Checkpoint images:", []*cobra.Command{imageCommand(), keyCommand(), lsCommand(), rmCommand(), pruneCommand()}},
		{"The node:", []*cobra.Command{doctorCommand(), oplogcmd.Report(), oplogcmd.Metrics(), recovercmd.Command(), cdiCommand(),
			installcmd.Install(), installcmd.Uninstall()}},
	} {
		root.AddGroup(&cobra.Group{ID: group.title, Title: group.title})
		for _, c := range group.commands {
			c.GroupID = group.title
		}
		root.AddCommand(group.commands...)
	}
	root.AddCommand(cudatool.Command(), demoCommand(), versionCommand(), manCommand(), cniCommand(), installcmd.Wait())
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error {
		if n, ok := errors.AsType[*strconv.NumError](err); ok { // in words of Go's library
			return errors.New(strings.Replace(err.Error(), n.Error(), "it must be a number", 1))
		}
		return err
	})
	// Above "error", containerd's packages log what errors and progress say.
	root.PersistentFlags().String(logLevel, "error", "least level that is logged to standard error: trace, debug, info, warn, error")
	_ = root.RegisterFlagCompletionFunc(logLevel, cobra.FixedCompletions([]string{"trace", "debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	root.Version = version.String()
	root.SetVersionTemplate("gpuckpt {{.Version}}\n")
	return root
}
