// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package images reads, checks and writes the files of a checkpoint.
//
// A checkpoint begins as a flat directory that CRIU fills with its images and the shim with GPU
// state. It is complete once it has gpuckpt.json, which WriteMetadata writes last and by rename.
// Nothing changes the files after that. A checkpoint image has GPU state and memory in pieces.
//
// A reader opens the files where they are (Open, OpenFiles, OpenImage), and has for each Area of
// GPU state a Location: the pieces that hold its bytes. Check compares these with their digests.
package images

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/moby/sys/atomicwriter"
	"lukechampine.com/blake3"
)

// MetadataName is the name of the metadata file inside a checkpoint directory.
const MetadataName = "gpuckpt.json"

// SchemaVersion is the version of the metadata that this package writes. The package reads versions 1 to
// LatestSchema, of which the last is that of processes with CustomStorage. docs/internals/format.md, "What may change
// how", says when they grow.
const (
	SchemaVersion = 2
	LatestSchema  = 3
)

// maxMetadata bounds the file, in bytes. 64 MiB of state take 90: eight GPUs of 1.4 TiB fit.
const maxMetadata = 16 << 20

var (
	// ErrNoMetadata reports that there is no gpuckpt.json: no GPU state, or no checkpoint.
	ErrNoMetadata = errors.New("no " + MetadataName)
	// ErrSchema reports a gpuckpt.json of a schema version that is not known.
	ErrSchema = errors.New("unknown schema version")
	// ErrMalformed reports a gpuckpt.json that is damaged or not this project's.
	ErrMalformed = errors.New("malformed " + MetadataName)
)

// HasCustomStorage reports whether the driver's custom storage has saved GPU memory: gpuckpt verifies such a
// checkpoint, and does not restore it (docs/decisions/0040).
func (m *Metadata) HasCustomStorage() bool {
	return slices.ContainsFunc(m.Processes, func(p Process) bool { return p.CustomStorage })
}

// Metadata is the content of gpuckpt.json. docs/internals/format.md describes it for others.
type Metadata struct {
	// SchemaVersion is the version that the file was written in.
	SchemaVersion int `json:"schemaVersion"`
	// Created is the time at which the checkpoint began.
	Created time.Time `json:"created"`
	// DriverVersion is that of the NVIDIA driver, such as "580.159.04": no other can restore.
	DriverVersion string `json:"driverVersion"`
	// CUDAVersion is the newest CUDA version the driver supports, "13.0".
	CUDAVersion string `json:"cudaVersion"`
	// GPUs are the GPUs of all processes, by index.
	GPUs []GPU `json:"gpus"`
	// Processes are the CUDA processes; none for a container that used no GPU.
	Processes []Process `json:"processes"`
	// Phases are the steps of the checkpoint in the order they began.
	Phases []Phase `json:"phases"`
	// Digest is the BLAKE3 digest of all bytes of the file before its own 64 hexadecimal digits,
	// with which the file ends. EncodeMetadata sets it.
	Digest string `json:"digest"`
}

// GPU is one GPU as the node of the checkpoint saw it.
type GPU struct {
	// UUID as the driver prints it, "GPU-" and 36 characters.
	UUID string `json:"uuid"`
	// Name is the product's name, "NVIDIA H200".
	Name string `json:"name"`
	// Memory is the GPU's whole memory in bytes.
	Memory uint64 `json:"memoryBytes"`
	// Index is the driver's number of the GPU on that node.
	Index int `json:"index"`
}

// Process is one CUDA process.
type Process struct {
	// PID is the process's id inside the container's pid namespace.
	PID int `json:"pid"`
	// State is the CUDA state before the checkpoint, to which a restore returns: "running",
	// "locked" or "checkpointed".
	State string `json:"state"`
	// GPUs are the UUIDs of the GPUs the process could open, used or not.
	GPUs []string `json:"gpus"`
	// Bytes is the size of the process's GPU state.
	Bytes uint64 `json:"bytes"`
	// RestoreThread is the driver's thread, counted as PID is, that maps the areas; 0: unknown.
	RestoreThread int `json:"restoreThread,omitempty"`
	// CustomStorage reports that the driver's custom storage (CUDA 13.4) has saved the GPU memory: the areas are of
	// GPUs. Nothing after commit cdc1ea6e writes it.
	CustomStorage bool `json:"customStorage,omitempty"`
	// Areas hold the GPU state in files of their own. Without any it is in CRIU's images.
	Areas []Area `json:"areas,omitempty"`
}

// AreaFile names the file of an area, by the process's pid inside and the area's number from 0.
func AreaFile(pid, number int) string { return fmt.Sprintf("%s%d", AreaPrefix(pid), number) }

// AreaPrefix returns what the names of all area files of a process begin with.
func AreaPrefix(pid int) string { return fmt.Sprintf("gpu-%d-", pid) }

// Phase is one step of a checkpoint or a restore.
type Phase struct {
	// Name is the step's name in docs/internals/how-it-works.md.
	Name string `json:"name"`
	// Start is the time from the operation's begin to the step's, and Took how
	// long the step took, both in nanoseconds.
	Start time.Duration `json:"startNs"`
	Took  time.Duration `json:"tookNs"`
	// Bytes is how much the step moved; 0 if it moves nothing.
	Bytes uint64 `json:"bytes,omitempty"`
}

// ReadMetadata reads and checks the gpuckpt.json in dir. The errors are ErrNoMetadata, ErrSchema
// and ErrMalformed, or those of reading.
func ReadMetadata(dir string) (*Metadata, error) {
	f := File{Name: MetadataName, Path: filepath.Join(dir, MetadataName)}
	st, err := os.Lstat(f.Path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("%w in %s", ErrNoMetadata, dir)
	case err != nil:
		return nil, fmt.Errorf("read checkpoint metadata: %w", err)
	case !st.Mode().IsRegular():
		return nil, fmt.Errorf("%w: %s is not a regular file", ErrMalformed, f.Path)
	}
	f.Bytes = uint64(st.Size())
	return f.metadata()
}

func (f File) metadata() (*Metadata, error) {
	r, err := f.Open()
	if err != nil {
		return nil, fmt.Errorf("read checkpoint metadata: %w", err)
	}
	defer r.Close()
	data, err := io.ReadAll(io.NewSectionReader(r, 0, int64(min(f.Bytes, maxMetadata+1))))
	if err != nil {
		return nil, fmt.Errorf("read checkpoint metadata: %w", err)
	}
	m, err := ParseMetadata(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", f.Path, err)
	}
	return m, nil
}

// ParseMetadata decodes and checks the bytes of a gpuckpt.json. The errors are ErrSchema, and
// ErrMalformed for a missing digest, impossible values and duplicates. Fields that it does not know
// are ignored: a later gpuckpt may add some.
func ParseMetadata(data []byte) (*Metadata, error) {
	if len(data) > maxMetadata {
		return nil, fmt.Errorf("%w: larger than %d bytes", ErrMalformed, maxMetadata)
	}
	// The version is looked at first, so that a newer file is called newer and not malformed.
	var version struct {
		SchemaVersion *int `json:"schemaVersion"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if version.SchemaVersion == nil {
		return nil, fmt.Errorf("%w: schemaVersion is missing", ErrMalformed)
	}
	if v := *version.SchemaVersion; v < 1 || v > LatestSchema {
		return nil, fmt.Errorf("%w %d: this gpuckpt reads versions 1 to %d; restore with the gpuckpt that wrote the checkpoint, or a newer one", ErrSchema, v, LatestSchema)
	}
	if err := checkSeal(data); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	m := new(Metadata)
	if err := json.Unmarshal(data, m); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if err := m.validate(); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return m, nil
}

// WriteMetadata checks m and writes it into dir as gpuckpt.json. It flushes all other files first:
// a power failure leaves a complete checkpoint or one without gpuckpt.json. before is called with
// the bytes of gpuckpt.json before the files are flushed, and may add to them.
func WriteMetadata(dir string, m *Metadata, before ...func(encoded []byte) error) error {
	data, err := EncodeMetadata(m)
	for _, do := range before {
		if err == nil {
			err = do(data)
		}
	}
	if err == nil {
		err = flush(dir)
	}
	if err == nil {
		err = atomicwriter.WriteFile(filepath.Join(dir, MetadataName), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write checkpoint metadata: %w", err)
	}
	// Without this flush too the file is complete, and is either found or not.
	_ = flushFile(dir)
	return nil
}

// EncodeMetadata checks m, sets its Digest and returns the bytes of its gpuckpt.json.
func EncodeMetadata(m *Metadata) ([]byte, error) {
	if m.SchemaVersion != SchemaVersion {
		return nil, fmt.Errorf("schemaVersion is %d, not %d", m.SchemaVersion, SchemaVersion)
	}
	if err := m.validate(); err != nil {
		return nil, err
	}
	m.Digest = sealPrefix + strings.Repeat("0", sealDigits)
	data, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return nil, err
	}
	begin := len(data) - len(sealEnd) - sealDigits
	m.Digest = fmt.Sprintf("%s%x", sealPrefix, blake3.Sum256(data[:begin]))
	copy(data[begin:], m.Digest[len(sealPrefix):])
	data = append(data, '\n')
	if len(data) > maxMetadata {
		return nil, fmt.Errorf("%d bytes, more than %d", len(data), maxMetadata)
	}
	return data, nil
}

const (
	sealPrefix = "blake3:"
	sealDigits = 64
	// sealEnd is what is behind the digits, but for the file's last line feed.
	sealEnd = "\"\n}"
)

func checkSeal(data []byte) error {
	rest, ok := bytes.CutSuffix(data, []byte(sealEnd+"\n"))
	if !ok || len(rest) < sealDigits {
		return errors.New("it does not end with a digest")
	}
	at := len(rest) - sealDigits
	if !bytes.HasSuffix(rest[:at], []byte("\n  \"digest\": \""+sealPrefix)) {
		return errors.New("it does not end with a digest")
	}
	if got := fmt.Sprintf("%x", blake3.Sum256(rest[:at])); got != string(rest[at:]) {
		return fmt.Errorf("its digest is %s%s, not %s%s: the file was changed or damaged", sealPrefix, got, sealPrefix, rest[at:])
	}
	return nil
}

// flush writes the plain files of a directory to the disk: CRIU does not.
func flush(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if err == nil && e.Type().IsRegular() {
			err = flushFile(filepath.Join(dir, e.Name()))
		}
	}
	return err
}

func flushFile(name string) error {
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// uuidForm matches a GPU's UUID as the driver prints it.
var uuidForm = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`)
})

func (m *Metadata) validate() error {
	switch {
	case m.Created.IsZero():
		return errors.New("created is missing")
	case len(m.Processes) == 0 && (len(m.GPUs) > 0 || m.DriverVersion != ""):
		return errors.New("no processes")
	case m.DriverVersion == "" && len(m.Processes) > 0:
		return errors.New("driverVersion is missing")
	}
	gpus := make(map[string]bool, len(m.GPUs))
	for _, g := range m.GPUs {
		switch {
		case !uuidForm().MatchString(g.UUID):
			return fmt.Errorf("GPU UUID %q is not of the form GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx", g.UUID)
		case gpus[g.UUID]:
			return fmt.Errorf("GPU %s is named twice", g.UUID)
		case g.Index < 0:
			return fmt.Errorf("GPU %s has the index %d", g.UUID, g.Index)
		}
		gpus[g.UUID] = true
	}
	pids := make(map[int]bool, len(m.Processes))
	files := make(map[string]bool)
	for _, p := range m.Processes {
		switch {
		case p.PID <= 0 || pids[p.PID]:
			return fmt.Errorf("process id %d is impossible or named twice", p.PID)
		case p.RestoreThread < 0:
			return fmt.Errorf("process %d has the thread %d", p.PID, p.RestoreThread)
		case p.State != "running" && p.State != "locked" && p.State != "checkpointed":
			return fmt.Errorf("process %d has the state %q", p.PID, p.State)
		}
		pids[p.PID] = true
		if p.CustomStorage && m.SchemaVersion < LatestSchema {
			return fmt.Errorf("process %d has custom storage, which schemaVersion %d does not know", p.PID, m.SchemaVersion)
		}
		if err := p.validateAreas(files, digestForms()[m.SchemaVersion]); err != nil {
			return err
		}
		for _, u := range p.GPUs {
			if !gpus[u] {
				return fmt.Errorf("process %d uses GPU %q, which is not among the gpus", p.PID, u)
			}
		}
	}
	for _, ph := range m.Phases {
		if ph.Name == "" || ph.Start < 0 || ph.Took < 0 {
			return fmt.Errorf("phase %q has an impossible time", ph.Name)
		}
	}
	return nil
}

var areaFileForm = sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(`^gpu-[1-9][0-9]*-[0-9]+$`) })

// PageBytes is the smallest page of the processors that CUDA runs on.
const PageBytes = 4096

// validateAreas checks the areas of one process. files are the names used so far.
func (p *Process) validateAreas(files map[string]bool, digests *regexp.Regexp) error {
	for _, a := range p.Areas {
		end := a.Start + a.Bytes
		switch {
		case !areaFileForm().MatchString(a.File) || files[a.File]:
			return fmt.Errorf("invalid or duplicate area file name %q", a.File)
		case a.Bytes == 0 || (a.Start|a.Bytes|a.Offset)%PageBytes != 0 || end < a.Start || a.Offset+a.Bytes < a.Offset || a.Offset >= 2<<20:
			return fmt.Errorf("area %s: %d bytes at %#x from offset %d are impossible", a.File, a.Bytes, a.Start, a.Offset)
		case p.CustomStorage != (a.GPU != "") || p.CustomStorage && (a.Start|a.Offset != 0 || a.Interposer || !slices.Contains(p.GPUs, a.GPU)):
			return fmt.Errorf("area %s is not memory of a GPU that process %d could open, but of %q", a.File, p.PID, a.GPU)
		case uint64(len(a.Digests)) != Blocks(a.Bytes):
			return fmt.Errorf("area %s: %d digests for %d bytes", a.File, len(a.Digests), a.Bytes)
		}
		files[a.File] = true
		for _, d := range a.Digests {
			if !digests.MatchString(d) {
				return fmt.Errorf("area %s: digest %q is not of the form %s", a.File, d, digests)
			}
		}
	}
	// In order, since an image that nobody has signed may have very many.
	ordered := slices.SortedFunc(slices.Values(p.Areas), func(a, b Area) int {
		return cmp.Or(strings.Compare(a.GPU, b.GPU), cmp.Compare(a.Start, b.Start))
	})
	for i := 1; i < len(ordered); i++ {
		if a, b := ordered[i-1], ordered[i]; a.GPU == b.GPU && b.Start < a.Start+a.Bytes {
			return fmt.Errorf("areas %s and %s overlap", a.File, b.File)
		}
	}
	return nil
}
