// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"path/filepath"
)

// chart writes deploy/chart as Helm takes it, with the release's version.
func (r release) chart() error {
	t, err := readTree(filepath.Join(r.source, "deploy", "chart"))
	if err != nil {
		return err
	}
	for i, f := range t {
		if f.name == "Chart.yaml" {
			t[i].data = bytes.ReplaceAll(f.data, []byte("0.0.0"), []byte(r.version))
		}
	}
	return r.archive(filepath.Join(r.out, "gpuckpt-chart-"+r.version+".tgz"), "gpuckpt", t)
}
