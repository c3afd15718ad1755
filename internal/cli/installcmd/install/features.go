// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package install

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/gpuckpt/gpuckpt/internal/node/version"
)

// featuresDir is where Node Feature Discovery's source "local" reads files.
const featuresDir = "/etc/kubernetes/node-feature-discovery/features.d"

// notInLabel is what the value of a label cannot have.
var notInLabel = regexp.MustCompile(`[^A-Za-z0-9._-]+`)

// writeFeatures writes the node's features where Node Feature Discovery reads them. NFD makes labels
// of them: feature.node.kubernetes.io/gpuckpt.version and so on.
func (o Options) writeFeatures(ctx context.Context, c *changes) error {
	if _, err := os.Stat(o.at(filepath.Dir(featuresDir))); err != nil {
		return nil // nobody reads them
	}
	facts := map[string]string{}
	// A node without a GPU has no facts, and gets its version only.
	if out, _, err := o.run(ctx, filepath.Join(o.Prefix, "bin", "gpuckpt"), "doctor", "--annotations", "--json"); err == nil {
		if err := json.Unmarshal(out, &facts); err != nil {
			return fmt.Errorf("read the node's facts: %w", err)
		}
	}
	facts["dev.gpuckpt.version"] = version.Short()
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(facts)) {
		value := notInLabel.ReplaceAllString(facts[key], "-")
		value = strings.Trim(value[:min(len(value), 63)], "-_.")
		fmt.Fprintf(&b, "%s=%s\n", strings.TrimPrefix(key, "dev."), value)
	}
	return c.write(filepath.Join(featuresDir, "gpuckpt"), b.String())
}
