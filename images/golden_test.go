// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"path/filepath"
	"reflect"
	"testing"
	"time"
)

// The checkpoints in testdata were written by the commits of main that are named
// here. Every later commit reads them: see docs/internals/format.md, "What may change how".
func TestGoldenCheckpoints(t *testing.T) {
	const uuid = "GPU-5af7c0da-0000-4000-8000-000000000000"
	const xxh = "xxh3-128:a71bbd576c065d1ca6fe1bef160d14e8"
	want := func(version int, block, digest string, thread int) *Metadata {
		return &Metadata{
			SchemaVersion: version, Created: time.Date(2026, 1, 31, 12, 0, 0, 0, time.UTC),
			DriverVersion: "580.159.04", CUDAVersion: "13.0",
			GPUs: []GPU{{UUID: uuid, Name: "NVIDIA H200", Memory: 150754820096, Index: 3}},
			Processes: []Process{
				{PID: 1, State: "running", GPUs: []string{uuid}, Bytes: 8192, RestoreThread: thread, Areas: []Area{
					{File: "gpu-1-0", Start: 140737345753088, Bytes: 8192, Offset: 4096, Digests: []string{block}},
				}},
				{PID: 9, State: "checkpointed", GPUs: []string{}},
			},
			Phases: []Phase{{Name: "lock", Took: 5 * time.Millisecond}, {Name: "dump", Start: 51 * time.Millisecond, Took: 104 * time.Millisecond, Bytes: 2299154}},
			Digest: digest,
		}
	}
	for _, c := range []struct {
		dir  string
		want *Metadata
	}{
		// ec433ce: the first that ends with a digest.
		{"schema-1", want(1, xxh, "blake3:38226033b252a67680a4d12524f36f68eddf82d7d82a8109fa9c4df4fd9dc352", 0)},
		// 745b097: restoreThread.
		{"schema-1-restore-thread", want(1, xxh, "blake3:a966fd124a3ab10817c71dac8894ffcc26861557b9388c11ec0cf635e0091291", 7)},
		// A later version, made up: with fields that this one does not know.
		{"schema-1-later", want(1, xxh, "blake3:4667e98be76fc28aaf84a771f505b92a08c57b34b4bbccca885d048b478794e1", 7)},
		// The first with BLAKE3 digests of GPU state.
		{"schema-2", want(2, "blake3:85059312c2228de01464806f32a28f178785ff4e20df07d543dfc8b36d66705f", "blake3:2e1896fe6d5a59905000cc26c0bd7b58fe69194875cbed52e27cfbd742255b9c", 7)},
		// The first with custom storage, made up: no driver that has it was at hand.
		{"schema-3", func() *Metadata {
			m := want(3, "blake3:85059312c2228de01464806f32a28f178785ff4e20df07d543dfc8b36d66705f", "blake3:f8bd8511f61be9517b4cbc9c2cb40b8ee2ff2e45d81d059ef05c5f7eb9bc776d", 7)
			m.DriverVersion, m.CUDAVersion, m.Processes[0].CustomStorage = "615.71", "13.4", true
			a := &m.Processes[0].Areas[0]
			a.Start, a.Offset, a.GPU = 0, 0, uuid
			return m
		}()},
	} {
		t.Run(c.dir, func(t *testing.T) {
			opened, err := Open(filepath.Join("testdata", c.dir))
			if err != nil {
				t.Fatal(err)
			}
			if err := Check(t.Context(), opened.Areas(), 0, nil); err != nil {
				t.Error(err)
			}
			got := opened.Metadata
			got.Processes[0].Areas[0].Location = nil
			if !reflect.DeepEqual(got, c.want) {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
