// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/gpuckpt/gpuckpt/internal/cli/oplogcmd/timeline"
	"github.com/gpuckpt/gpuckpt/internal/operation/oplog"
)

// Whatever a full disk has left of the log of operations, its numbers are counted, and its pictures
// are XML.
func FuzzLog(f *testing.F) {
	f.Add([]byte(`{"operation":"restore","namespace":"ns","container":"c","tookNs":5,"phases":[{"name":"map","startNs":1,"tookNs":2,"bytes":3}]}` + "\n"))
	f.Add([]byte(`{"operation":"<&\u0000","tookNs":9223372036854775807,"phases":[{"name":"\ud800","tookNs":-9}],"failed":"x"}` + "\n"))
	f.Add([]byte("null\n[]\n{\"phases\":[null]}\nhalf a line"))
	f.Fuzz(func(t *testing.T, text []byte) {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, oplog.Name), text, 0o600); err != nil {
			t.Fatal(err)
		}
		entries, err := oplog.Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		c := New(dir)
		c.Add(entries)
		all := prometheus.NewRegistry()
		if err := all.Register(c); err != nil {
			t.Fatal(err)
		}
		if _, err := all.Gather(); err != nil {
			t.Fatal(err)
		}
		var charts []timeline.Chart
		for _, e := range entries {
			charts = append(charts, timeline.Chart{Title: e.Container, Phases: e.Phases, Whole: e.Took, Failed: e.Failed})
		}
		for picture := xml.NewDecoder(strings.NewReader(string(timeline.SVG(charts...)))); ; {
			if _, err := picture.Token(); errors.Is(err, io.EOF) {
				return
			} else if err != nil {
				t.Fatal(err)
			}
		}
	})
}
