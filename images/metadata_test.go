// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package images

import (
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"lukechampine.com/blake3"
)

const (
	uuid0 = "GPU-00000000-0000-4000-8000-000000000000"
	uuid1 = "GPU-00000000-0000-4000-8000-000000000001"
)

var blockDigest = "blake3:" + strings.Repeat("0a", 32)

func TestZeroBlockDigest(t *testing.T) {
	zeros := make([]byte, BlockBytes)
	for _, like := range []string{ZeroBlockDigest, zeroBlockXXH} {
		h := NewBlockHashLike(like)
		h.Write(zeros)
		if got := h.Digest(); got != like || ZeroBlockLike(like) != like || !IsZeroBlock(like) {
			t.Errorf("it is %s, want %s", like, got)
		}
	}
	if DigestBlock(zeros) != ZeroBlockDigest {
		t.Error("blocks are not digested by BLAKE3")
	}
}

func sample() *Metadata {
	return &Metadata{
		SchemaVersion: SchemaVersion,
		Created:       time.Date(2026, 11, 21, 1, 2, 3, 0, time.UTC),
		DriverVersion: "580.159.04",
		CUDAVersion:   "13.0",
		GPUs:          []GPU{{UUID: uuid0, Name: "NVIDIA H200", Memory: 150_000_000_000}},
		Processes: []Process{{PID: 1, RestoreThread: 7, State: "running", GPUs: []string{uuid0}, Bytes: 1 << 27, Areas: []Area{
			{File: "gpu-1-0", Start: 0x7f0000001000, Bytes: 1<<27 - 4096, Offset: 4096, Digests: []string{blockDigest, blockDigest}},
		}}},
		Phases: []Phase{{Name: "lock", Took: 15 * time.Millisecond}, {Name: "dump", Start: time.Second, Took: time.Second, Bytes: 4096}},
	}
}

func TestMetadataRoundTrip(t *testing.T) {
	dir := t.TempDir()
	if _, err := ReadMetadata(dir); !errors.Is(err, ErrNoMetadata) {
		t.Fatalf("empty directory: got %v, want ErrNoMetadata", err)
	}
	want := sample()
	if err := WriteMetadata(dir, want); err != nil {
		t.Fatal(err)
	}
	got, err := ReadMetadata(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	names, _ := filepath.Glob(filepath.Join(dir, "*"))
	hidden, _ := filepath.Glob(filepath.Join(dir, ".*"))
	if len(names)+len(hidden) != 1 {
		t.Errorf("files left beside %s: %v %v", MetadataName, names, hidden)
	}
}

func TestWriteMetadataLeavesNothingOnError(t *testing.T) {
	dir := t.TempDir()
	bad := sample()
	bad.Processes[0].PID = 0
	if err := WriteMetadata(dir, bad); err == nil {
		t.Fatal("an impossible pid was written")
	}
	// A directory of the file's own name makes the last step, the rename, fail.
	if err := os.MkdirAll(filepath.Join(dir, MetadataName, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteMetadata(dir, sample()); err == nil {
		t.Fatal("the rename over a directory succeeded")
	}
	if hidden, _ := filepath.Glob(filepath.Join(dir, ".*")); len(hidden) != 0 {
		t.Errorf("temporary files left: %v", hidden)
	}
}

// TestSizeWithoutDigests has a size that is none in blocks, were it rounded up by an addition: who goes through them had no end.
func TestSizeWithoutDigests(t *testing.T) {
	m := sample()
	m.Processes[0].Areas[0] = Area{File: "gpu-1-0", Bytes: math.MaxUint64 - PageBytes + 1}
	if _, err := EncodeMetadata(m); err == nil || !strings.Contains(err.Error(), "0 digests") {
		t.Errorf("got %v", err)
	}
}

func TestOverlappingAreas(t *testing.T) {
	for want, starts := range map[string][]uint64{
		"":                                  {20, 10, 12, 18},
		"areas gpu-1-2 and gpu-1-0 overlap": {20, 10, 19},
		"areas gpu-1-0 and gpu-1-1 overlap": {10, 10},
	} {
		m := sample()
		m.Processes[0].Areas = nil
		for i, at := range starts {
			m.Processes[0].Areas = append(m.Processes[0].Areas, Area{File: fmt.Sprint("gpu-1-", i), Start: at << 20, Bytes: 2 << 20, Digests: []string{blockDigest}})
		}
		if _, err := EncodeMetadata(m); want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("areas at %d MiB: %v", starts, err)
		}
	}
}

func TestParseMetadataRefuses(t *testing.T) {
	valid, err := EncodeMetadata(sample())
	if err != nil {
		t.Fatal(err)
	}
	// The digest is made right again: the rules are to be seen at work.
	edit := func(from, to string) string {
		s := strings.Replace(string(valid), from, to, 1)
		if s == string(valid) {
			t.Fatalf("the sample has no %q", from)
		}
		return string(reseal([]byte(s)))
	}
	for name, c := range map[string]struct {
		data string
		want error
	}{
		"empty":              {"", ErrMalformed},
		"truncated":          {string(valid[:len(valid)/2]), ErrMalformed},
		"no version":         {"{}", ErrMalformed},
		"newer version":      {edit(`"schemaVersion": 2`, `"schemaVersion": 4, "new": true`), ErrSchema},
		"version 0":          {edit(`"schemaVersion": 2`, `"schemaVersion": 0`), ErrSchema},
		"trailing text":      {string(valid) + "{}", ErrMalformed},
		"negative bytes":     {edit(`"bytes": 134217728`, `"bytes": -1`), ErrMalformed},
		"pid 0":              {edit(`"pid": 1`, `"pid": 0`), ErrMalformed},
		"negative thread":    {edit(`"restoreThread": 7`, `"restoreThread": -7`), ErrMalformed},
		"unknown state":      {edit(`"state": "running"`, `"state": "failed"`), ErrMalformed},
		"file outside":       {edit(`"file": "gpu-1-0"`, `"file": "../gpu-1-0"`), ErrMalformed},
		"other file":         {edit(`"file": "gpu-1-0"`, `"file": "pages-1.img"`), ErrMalformed},
		"half a page":        {edit(`"offset": 4096`, `"offset": 2048`), ErrMalformed},
		"far offset":         {edit(`"offset": 4096`, `"offset": 4194304`), ErrMalformed},
		"a digest short":     {edit(`"`+blockDigest+`",`, ``), ErrMalformed},
		"no digest":          {edit(blockDigest, "blake3:0"), ErrMalformed},
		"version 1's digest": {edit(blockDigest, "xxh3-128:"+strings.Repeat("0a", 16)), ErrMalformed},
		"past the end":       {edit(fmt.Sprint(0x7f0000001000), "18446744073709547520"), ErrMalformed},
		"unknown GPU":        {edit("        \"GPU-0", "        \"GPU-1"), ErrMalformed},
		"UUID with newline":  {edit(`"uuid": "GPU-`, `"uuid": "GPU-\n`), ErrMalformed},
		"negative phase":     {edit(`"startNs": 0`, `"startNs": -5`), ErrMalformed},
		"no driver":          {edit("580.159.04", ""), ErrMalformed},
		"huge":               {fmt.Sprintf(`{"schemaVersion":1,"cudaVersion":"%s"}`, strings.Repeat("a", maxMetadata)), ErrMalformed},
	} {
		if _, err := ParseMetadata([]byte(c.data)); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
}

// reseal makes the digest right, if there is one.
func reseal(data []byte) []byte {
	end := len(data) - len(sealEnd) - 1
	if end < sealDigits || checkSeal(data) == nil {
		return data
	}
	sum := blake3.Sum256(data[:end-sealDigits])
	return slices.Concat(data[:end-sealDigits], []byte(hex.EncodeToString(sum[:])), data[end:])
}

func TestEveryChangedByteIsNoticed(t *testing.T) {
	valid, err := EncodeMetadata(sample())
	if err != nil {
		t.Fatal(err)
	}
	for i := range valid {
		for _, bit := range []byte{1, 0x20, 0x80} {
			changed := slices.Clone(valid)
			changed[i] ^= bit
			if _, err := ParseMetadata(changed); !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrSchema) {
				t.Fatalf("byte %d, %q for %q: got %v", i, changed[i], valid[i], err)
			}
		}
		if _, err := ParseMetadata(valid[:i]); !errors.Is(err, ErrMalformed) {
			t.Fatalf("cut to %d bytes: got %v", i, err)
		}
	}
}

func FuzzParseMetadata(f *testing.F) {
	valid, err := EncodeMetadata(sample())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(valid)
	f.Add([]byte(`{"schemaVersion":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := ParseMetadata(reseal(data))
		if err != nil {
			return
		}
		// What is accepted can be written and read again.
		dir := t.TempDir()
		if err := WriteMetadata(dir, m); err != nil {
			t.Fatalf("accepted, then not writable: %v", err)
		}
		if _, err := ReadMetadata(dir); err != nil {
			t.Fatalf("accepted, then not readable: %v", err)
		}
	})
}

func ExampleWriteMetadata() {
	dir, err := os.MkdirTemp("", "checkpoint")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	err = WriteMetadata(dir, &Metadata{
		SchemaVersion: SchemaVersion,
		Created:       time.Now(),
		DriverVersion: "580.159.04",
		CUDAVersion:   "13.0",
		GPUs:          []GPU{{UUID: uuid0, Name: "NVIDIA H200", Memory: 150 << 30}},
		Processes:     []Process{{PID: 1, State: "running", GPUs: []string{uuid0}, Bytes: 16 << 30}},
	})
	if err != nil {
		panic(err)
	}
	m, err := ReadMetadata(dir)
	if err != nil {
		panic(err)
	}
	fmt.Println(m.DriverVersion, len(m.Processes))
	// Output: 580.159.04 1
}

// custom is a checkpoint by custom storage of a process that could open two GPUs.
func custom() *Metadata {
	m := sample()
	m.SchemaVersion = LatestSchema
	m.GPUs = append(m.GPUs, GPU{UUID: uuid1, Name: "NVIDIA H200", Memory: 150_000_000_000, Index: 1})
	p := &m.Processes[0]
	p.GPUs, p.CustomStorage = append(p.GPUs, uuid1), true
	p.Areas[0].Start, p.Areas[0].Offset, p.Areas[0].GPU = 0, 0, uuid0
	p.Areas = append(p.Areas, Area{File: "gpu-1-1", Bytes: 4096, GPU: uuid1, Digests: []string{blockDigest}})
	return m
}

func TestCustomStorage(t *testing.T) {
	if sample().HasCustomStorage() || !custom().HasCustomStorage() {
		t.Error("custom storage is not told from others")
	}
	if err := custom().validate(); err != nil {
		t.Fatal(err)
	}
	if _, err := EncodeMetadata(custom()); err == nil {
		t.Error("written")
	}
	for name, change := range map[string]func(m *Metadata){
		"a version that older ones read": func(m *Metadata) { m.SchemaVersion = SchemaVersion },
		"an area of no GPU":              func(m *Metadata) { m.Processes[0].Areas[1].GPU = "" },
		"an area of another GPU":         func(m *Metadata) { m.Processes[0].GPUs = m.Processes[0].GPUs[:1] },
		"two areas of one GPU":           func(m *Metadata) { m.Processes[0].Areas[1].GPU = uuid0 },
		"an area with an address":        func(m *Metadata) { m.Processes[0].Areas[0].Start = 4096 },
		"an area with an offset":         func(m *Metadata) { m.Processes[0].Areas[0].Offset = 4096 },
		"an area of an interposer":       func(m *Metadata) { m.Processes[0].Areas[0].Interposer = true },
		"areas of GPUs without it":       func(m *Metadata) { m.Processes[0].CustomStorage = false },
	} {
		m := custom()
		change(m)
		if err := m.validate(); err == nil {
			t.Errorf("%s: read", name)
		}
	}
}
