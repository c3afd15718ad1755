// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package progress

import (
	"bytes"
	"encoding/json"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gpuckpt/gpuckpt/images"
)

// A program gets a line each second of a step, and none of one that is over sooner.
func TestLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := New(false, true)
		p.lines = json.NewEncoder(&out)
		p.Show(images.Step{Name: "dump"})
		p.Show(images.Step{Name: "dump", Note: "dumped", Ended: true})
		for done := range uint64(3) {
			p.Show(images.Step{Name: "push", Done: done, Total: 4})
			p.Show(images.Step{Name: "push", Done: done, Total: 5})
			time.Sleep(jsonEvery)
		}
		p.Wait()
		if want := `{"step":"push","done":1,"total":4}` + "\n" + `{"step":"push","done":2,"total":4}` + "\n"; out.String() != want {
			t.Errorf("it prints %s, want %s", &out, want)
		}
	})
}
