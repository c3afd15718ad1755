// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metadata "github.com/checkpoint-restore/checkpointctl/lib"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/sign"
)

// item is one entry of an archive that a test makes.
type item struct {
	name string
	data string
	kind byte // 0 is a plain file
	link string
}

func tarOf(t testing.TB, items ...item) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, i := range items {
		h := &tar.Header{Typeflag: i.kind, Name: i.name, Linkname: i.link, Mode: 0o600, Size: int64(len(i.data))}
		if i.kind == 0 {
			h.Typeflag = tar.TypeReg
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, i.data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func open(t testing.TB, data []byte) (*Archive, error) {
	t.Helper()
	return read(t.Context(), bytes.NewReader(data), int64(len(data)))
}

// sound is an archive of a container without GPU.
func sound() []item {
	return []item{
		{name: "config.dump", data: `{"id":"1","name":"job","rootfsImageName":"example.com/base:1","extra":1}`},
		{name: "spec.dump", data: `{}`},
		{name: "checkpoint/", kind: tar.TypeDir},
		{name: "checkpoint/inventory.img", data: "x"},
		{name: "./dump.log", data: "said"},
		{name: "bind.mounts/none", data: ""},
	}
}

func TestOpen(t *testing.T) {
	a, err := open(t, tarOf(t, sound()...))
	if err != nil {
		t.Fatal(err)
	}
	if a.Config.Name != "job" || a.Checkpoint.Metadata != nil {
		t.Errorf("got %+v", a.Config)
	}
	var names []string
	for _, f := range a.Checkpoint.Files {
		names = append(names, f.Name)
	}
	slices.Sort(names)
	if want := []string{"config.dump", "dump.log", "inventory.img", "spec.dump"}; !slices.Equal(names, want) {
		t.Errorf("files %q, want %q", names, want)
	}
	if r, err := a.RootFS(t.Context()); r != nil || err != nil {
		t.Errorf("writable files of an archive without: %v, %v", r, err)
	}
}

// podman is an archive as Podman 4.3 and 5.4 export it, uncompressed: with more at the root, and
// with shared memory apart even where there is none.
func podman(t testing.TB) []item {
	shm := tarOf(t, item{name: "./", kind: tar.TypeDir})
	return []item{
		{name: "artifacts/", kind: tar.TypeDir},
		{name: "artifacts/label", data: "x"},
		{name: "devshm-checkpoint.tar", data: string(shm)},
		{name: "config.dump", data: `{"spec":{"ociVersion":"1.2.0"},"id":"1","name":"job","idMappingsOptions":{},"rootfsImageID":"2","rootfsImageName":"example.com/base:1",` +
			`"shmDir":"/var/lib/containers/shm","shmSize":65536000,"createdTime":"2026-11-21T08:00:00Z","checkpointedTime":"2026-11-21T09:00:00Z","runtime":"crun"}`},
		{name: "spec.dump", data: `{}`},
		{name: "network.status", data: `{"podman":{"interfaces":{}}}`},
		{name: "stats-dump", data: "x"},
		{name: "dump.log", data: "said"},
		{name: "ctr.log", data: "said"},
		{name: "checkpoint/", kind: tar.TypeDir},
		{name: "checkpoint/inventory.img", data: "x"},
		{name: "rootfs-diff.tar", data: string(tarOf(t, item{name: "new", data: "file"}))},
		{name: "deleted.files", data: `["/old"]`},
	}
}

func TestOpenPodman(t *testing.T) {
	a, err := open(t, tarOf(t, podman(t)...))
	if err != nil {
		t.Fatal(err)
	}
	if a.Config.Name != "job" || a.Config.RootfsImageName != "example.com/base:1" {
		t.Errorf("got %+v", a.Config)
	}
	r, err := a.RootFS(t.Context())
	if err != nil || r == nil {
		t.Fatalf("its writable files: %v, %v", r, err)
	}
	defer r.Close()
	if _, err := io.ReadAll(r); err != nil {
		t.Error(err)
	}
}

func TestOpenRefuses(t *testing.T) {
	whole := tarOf(t, sound()...)
	var squeezed bytes.Buffer
	z := gzip.NewWriter(&squeezed)
	_, _ = z.Write(whole)
	_ = z.Close()
	with := func(more ...item) []byte { return tarOf(t, append(sound(), more...)...) }
	shm := func(more ...item) item {
		return item{name: "devshm-checkpoint.tar", data: string(tarOf(t, append([]item{{name: "./", kind: tar.TypeDir}}, more...)...))}
	}
	for name, c := range map[string]struct {
		data []byte
		want error
	}{
		"nothing":           {nil, ErrMalformed},
		"no tar archive":    {bytes.Repeat([]byte("no"), 1000), ErrMalformed},
		"cut short":         {whole[:1000], ErrMalformed},
		"compressed":        {squeezed.Bytes(), ErrUnsupported},
		"no config":         {tarOf(t, sound()[1:]...), ErrMalformed},
		"no inventory":      {tarOf(t, sound()[:3]...), ErrMalformed},
		"leads out":         {with(item{name: "checkpoint/../../x"}), ErrMalformed},
		"absolute":          {with(item{name: "/checkpoint/x"}), ErrMalformed},
		"twice":             {with(item{name: "./checkpoint/inventory.img"}), ErrMalformed},
		"symbolic link":     {with(item{name: "checkpoint/x", kind: tar.TypeSymlink, link: "/etc/shadow"}), ErrMalformed},
		"link elsewhere":    {with(item{name: "x", kind: tar.TypeSymlink, link: "y"}), ErrMalformed},
		"hard link":         {with(item{name: "checkpoint/x", kind: tar.TypeLink, link: "config.dump"}), ErrMalformed},
		"device":            {with(item{name: "checkpoint/x", kind: tar.TypeChar}), ErrMalformed},
		"FIFO":              {with(item{name: "checkpoint/x", kind: tar.TypeFifo}), ErrMalformed},
		"two of a name":     {with(item{name: "checkpoint/spec.dump"}), ErrMalformed},
		"GPU, no metadata":  {with(item{name: "checkpoint/gpu-1-0", data: "x"}), images.ErrDamaged},
		"bad metadata":      {with(item{name: "checkpoint/gpuckpt.json", data: "{}"}), images.ErrMalformed},
		"newer metadata":    {with(item{name: "checkpoint/gpuckpt.json", data: `{"schemaVersion":9}`}), images.ErrSchema},
		"config no JSON":    {tarOf(t, append(sound()[1:], item{name: "config.dump", data: "{"})...), ErrMalformed},
		"deletes the root":  {with(item{name: "deleted.files", data: `["/"]`}), ErrMalformed},
		"deletes outside":   {with(item{name: "deleted.files", data: `["/../x"]`}), ErrMalformed},
		"a volume":          {with(item{name: "volumes/a.tar"}), ErrUnsupported},
		"shared memory":     {with(shm(item{name: "./sem.x", data: "1"})), ErrUnsupported},
		"a directory in it": {with(shm(item{name: "./x/", kind: tar.TypeDir})), ErrUnsupported},
		"a link in it":      {with(shm(item{name: "./x", kind: tar.TypeSymlink, link: "y"})), ErrUnsupported},
		"it leads out":      {with(shm(item{name: "../x", data: "1"})), ErrMalformed},
		"it is no archive":  {with(item{name: "devshm-checkpoint.tar", data: strings.Repeat("no", 600)}), ErrMalformed},
		"a pod":             {with(item{name: "pod.options", data: "{}"}), ErrUnsupported},
	} {
		if _, err := open(t, c.data); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
}

// Deleted files become whiteouts, in a plain layer as in a compressed one.
func TestRootFS(t *testing.T) {
	plain := tarOf(t, item{name: "etc/", kind: tar.TypeDir}, item{name: "etc/new", data: "new"}, item{name: "etc/.wh.gone"})
	var squeezed bytes.Buffer
	z := gzip.NewWriter(&squeezed)
	if _, err := z.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	for name, layer := range map[string][]byte{"plain": plain, "gzip": squeezed.Bytes()} {
		a, err := open(t, tarOf(t, append(sound(), item{name: "rootfs-diff.tar", data: string(layer)},
			item{name: "deleted.files", data: `["/etc/gone","usr/lib/old"]`})...))
		if err != nil {
			t.Fatal(err)
		}
		r, err := a.RootFS(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got := namesOf(t, r)
		if want := []string{"etc/", "etc/new", "etc/.wh.gone", "usr/lib/.wh.old"}; !slices.Equal(got, want) {
			t.Errorf("%s: got %q, want %q", name, got, want)
		}
	}
}

func namesOf(t *testing.T, r io.Reader) (names []string) {
	t.Helper()
	for in := tar.NewReader(r); ; {
		h, err := in.Next()
		if err == io.EOF {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, h.Name)
	}
}

// flat is a dump with GPU state: 3 MiB from the second page of an area's file.
func flat(t *testing.T) *images.Checkpoint {
	t.Helper()
	dir := t.TempDir()
	state := bytes.Repeat([]byte("gpu state "), 3<<20/10+1)[:3<<20]
	for name, data := range map[string][]byte{
		"inventory.img": []byte("x"), "gpu-1-0": append(make([]byte, 4096), state...), metadata.SpecDumpFile: []byte(`{"hostname":"there"}`),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	const uuid = "GPU-00000000-0000-4000-8000-000000000000"
	err := images.WriteMetadata(dir, &images.Metadata{
		SchemaVersion: images.SchemaVersion, Created: time.Unix(1, 0).UTC(), DriverVersion: "580.1", CUDAVersion: "13.0",
		GPUs: []images.GPU{{UUID: uuid, Name: "GPU", Memory: 1 << 30}},
		Processes: []images.Process{{PID: 1, State: "running", GPUs: []string{uuid}, Bytes: 3 << 20, Areas: []images.Area{
			{File: "gpu-1-0", Start: 1 << 30, Bytes: 3 << 20, Offset: 4096, Digests: []string{images.DigestBlock(state)}},
		}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	c, err := images.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// What is written is read again, byte for byte, and the layers are one.
func TestWriteAndOpen(t *testing.T) {
	layer := func(items ...item) Layer {
		return func(context.Context) (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(tarOf(t, items...))), nil
		}
	}
	name := filepath.Join(t.TempDir(), "checkpoint.tar")
	var told uint64
	err := Write(t.Context(), name, Contents{
		Checkpoint: flat(t), Config: Config{Name: "job"}, Spec: json.RawMessage(`{"not":"this"}`),
		Layers: []Layer{
			layer(item{name: "a", data: "1"}, item{name: ".wh.b"}, item{name: ".wh.c"}),
			layer(item{name: "b/x", data: "2"}, item{name: ".wh.a"}),
		},
	}, func(s images.Step) { told = s.Done })
	if err != nil {
		t.Fatal(err)
	}
	a, err := Open(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := images.Check(t.Context(), a.Checkpoint.Areas(), 0, nil); err != nil {
		t.Error(err)
	}
	if a.Config.Name != "job" || told < 3<<20 {
		t.Errorf("config %+v, told of %d bytes", a.Config, told)
	}
	if !slices.Equal(a.deleted, []string{"a", "c"}) {
		t.Errorf("deleted files %q", a.deleted)
	}
	for _, f := range a.Checkpoint.Files {
		if f.Name != metadata.SpecDumpFile {
			continue
		}
		data := make([]byte, f.Bytes)
		if _, err := f.Data.ReadAt(data, 0); err != nil && err != io.EOF || string(data) != `{"hostname":"there"}` {
			t.Errorf("spec.dump is %s, %v", data, err)
		}
	}
	r, err := a.RootFS(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if got, want := namesOf(t, r), []string{"a", "b/x", ".wh.a", ".wh.c"}; !slices.Equal(got, want) {
		t.Errorf("the layer has %q, want %q", got, want)
	}
}

// A write that fails leaves what was there.
func TestWriteLeavesNothingOnError(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "checkpoint.tar")
	if err := os.WriteFile(name, []byte("before"), 0o600); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	err := Write(t.Context(), name, Contents{Checkpoint: flat(t), Layers: []Layer{func(context.Context) (io.ReadCloser, error) { return nil, broken }}}, nil)
	if !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Write(ctx, name, Contents{Checkpoint: flat(t)}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Errorf("left: %v, %v", entries, err)
	}
	if data, err := os.ReadFile(name); err != nil || string(data) != "before" {
		t.Errorf("the file is %q, %v", data, err)
	}
}

func FuzzOpen(f *testing.F) {
	f.Add(tarOf(f, sound()...))
	f.Add(tarOf(f, append(sound(), item{name: "rootfs-diff.tar", data: string(tarOf(f, item{name: "x"}))}, item{name: "deleted.files", data: `["y"]`})...))
	f.Add(tarOf(f, item{name: "../x"}))
	f.Add(tarOf(f, podman(f)...))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := open(t, data)
		if err != nil {
			return
		}
		// What is accepted stays within the archive.
		for _, file := range a.Checkpoint.Files {
			if file.Name == "" || strings.ContainsAny(file.Name, "/\x00") || file.Name == ".." {
				t.Errorf("a file named %q", file.Name)
			}
			buf := make([]byte, file.Bytes)
			if n, err := file.Data.ReadAt(buf, 0); uint64(n) != file.Bytes {
				t.Errorf("%s: %d bytes of %d, %v", file.Name, n, file.Bytes, err)
			}
		}
		r, err := a.RootFS(t.Context())
		if err != nil || r == nil {
			return
		}
		defer r.Close()
		for in := tar.NewReader(io.LimitReader(r, 1<<20)); ; {
			h, err := in.Next()
			if err != nil {
				return
			}
			if _, err := cleanName(h.Name); err != nil {
				t.Errorf("an entry named %q", h.Name)
			}
		}
	})
}

// What describes a container is a list of this project's; the names are checkpointctl's.
func TestRootFiles(t *testing.T) {
	for _, name := range []string{
		metadata.ConfigDumpFile, metadata.SpecDumpFile, metadata.StatusDumpFile, metadata.NetworkStatusFile,
		metadata.DumpLogFile, metadata.StatusFile, "stats-dump", "container.log", "io.kubernetes.cri-o.LogPath",
	} {
		if !sign.Describes(name) {
			t.Errorf("%s does not stay with the checkpoint", name)
		}
	}
	for _, name := range []string{"inventory.img", images.MetadataName, metadata.RootFsDiffTar} {
		if sign.Describes(name) {
			t.Errorf("%s only describes it", name)
		}
	}
}
