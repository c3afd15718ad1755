// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"

	"github.com/gpuckpt/gpuckpt/images"
	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/feed"
	"github.com/gpuckpt/gpuckpt/images/sign"
	"github.com/gpuckpt/gpuckpt/internal/criu/image"
	"github.com/gpuckpt/gpuckpt/internal/node/config"
)

// node returns the configuration of a node with a state directory of its own.
func node(t *testing.T, keys ...string) config.Node {
	t.Helper()
	n := config.Default()
	n.Signing.Key = filepath.Join(t.TempDir(), "gpuckpt", "signing.key")
	n.Restore.Keys = keys
	return n
}

func source(n config.Node) config.Source {
	return func() (config.View, error) { return config.View{Node: n}, nil }
}

// dump makes a dump without GPU state, complete as the node makes it.
func dump(t *testing.T, n config.Node) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "inventory.img"), "inventory")
	sealer, err := NewSealer(source(n), dir)
	if err == nil {
		err = sealer.Complete(t.Context(), dir, new(images.Metadata), nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func public(t *testing.T, n config.Node) string {
	t.Helper()
	s, err := sign.ReadSigner(n.Signing.Key)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "node.pub")
	write(t, path, string(s.Key.PEM()))
	return path
}

// A node restores what it has made, without anybody setting anything up. Another one does
// once the key counts there.
func TestOwnAndOther(t *testing.T) {
	here, there := node(t), node(t)
	dir := dump(t, here)
	if m, err := images.ReadMetadata(dir); err != nil || len(m.Processes) > 0 {
		t.Errorf("got %+v, %v", m, err)
	}
	if err := Admit(t.Context(), source(here), dir, nil); err != nil {
		t.Error(err)
	}
	err := Admit(t.Context(), source(there), dir, nil)
	if !errdefs.IsFailedPrecondition(err) || !errors.Is(err, sign.ErrUntrusted) || !strings.Contains(err.Error(), "no key is trusted here") {
		t.Errorf("a node without keys: %v", err)
	}
	dump(t, there)
	if err := Admit(t.Context(), source(there), dir, nil); !strings.Contains(err.Error(), "the trusted keys are ") {
		t.Errorf("a node with its own key: %v", err)
	}
	there.Restore.Keys = []string{public(t, here)}
	if err := Admit(t.Context(), source(there), dir, nil); err != nil {
		t.Errorf("a node where the key counts: %v", err)
	}
	// The node gets another key. The old one counts as long as it is kept.
	old := public(t, here)
	if err := os.Remove(here.Signing.Key); err != nil {
		t.Fatal(err)
	}
	dump(t, here)
	if err := Admit(t.Context(), source(here), dir, nil); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("after the key has changed: %v", err)
	}
	here.Restore.Keys = []string{old}
	if err := Admit(t.Context(), source(here), dir, nil); err != nil {
		t.Errorf("with the old key kept: %v", err)
	}
}

func TestPolicies(t *testing.T) {
	for _, c := range []struct {
		policy           string
		unsigned, forged bool // is it restored?
	}{
		{config.Never, false, false},
		{config.Signed, false, false},
		{config.Annotated, true, true},
		{config.Always, true, true},
	} {
		n := node(t)
		n.Restore.Policy = c.policy
		good := dump(t, n)
		mute := n
		mute.Signing.Key = ""
		unsigned := dump(t, mute)
		forged := dump(t, n)
		write(t, filepath.Join(forged, "inventory.img"), "Inventory")
		for what, d := range map[string]struct {
			dir  string
			want bool
			is   error
		}{"signed": {good, true, nil}, "unsigned": {unsigned, c.unsigned, sign.ErrUnsigned}, "forged": {forged, c.forged, sign.ErrChanged}} {
			for how, err := range map[string]error{"image": admitImage(t, source(n), d.dir), "client": Admit(t.Context(), source(n), d.dir, nil)} {
				if (err == nil) != d.want || err != nil && !errors.Is(err, d.is) {
					t.Errorf("%s: %s, %s: %v", c.policy, what, how, err)
				}
			}
		}
	}
}

// A list of digests binds the files also where no signature is asked for.
func TestListedDigest(t *testing.T) {
	n := node(t)
	dir := dump(t, n)
	manifest, err := os.ReadFile(filepath.Join(dir, sign.ManifestName))
	if err != nil {
		t.Fatal(err)
	}
	for _, policy := range []string{config.Signed, config.Always} {
		n.Restore.Policy = policy
		n.Restore.Images = []string{"a/*", sign.Digest([]byte("another"))}
		if err := admitImage(t, source(n), dir); err == nil {
			t.Errorf("%s: not listed: it is restored", policy)
		}
		n.Restore.Images = append(n.Restore.Images, sign.Digest(manifest))
		if err := admitImage(t, source(n), dir); err != nil {
			t.Errorf("%s: listed: %v", policy, err)
		}
		changed := dump(t, n)
		write(t, filepath.Join(changed, sign.ManifestName), string(manifest))
		if err := admitImage(t, source(n), changed); err == nil {
			t.Errorf("%s: other files beside a listed manifest are restored", policy)
		}
	}
	mute := n
	mute.Signing.Key = ""
	unsigned := dump(t, mute)
	if err := admitImage(t, source(n), unsigned); err == nil {
		t.Error("a checkpoint without a manifest is restored")
	}
	named := func() (config.View, error) {
		return config.View{Node: n, Annotations: map[string]string{annotations.CRIImageName: "a/b"}}, nil
	}
	if err := admitImage(t, named, unsigned); err != nil {
		t.Errorf("listed by name: %v", err)
	}
}

// Nothing but the seal is opened of a checkpoint that nobody has signed whose signature
// counts, and nothing is parsed of one that was changed.
func TestNothingIsParsedBefore(t *testing.T) {
	here, there := node(t), node(t)
	dir := dump(t, here)
	for _, name := range []string{"inventory.img", images.MetadataName} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink("/proc/self/mem", filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
		if err := Admit(t.Context(), source(there), dir, nil); !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s is a link: %v", name, err)
		}
		write(t, filepath.Join(dir, name+".new"), "{")
		if err := os.Rename(filepath.Join(dir, name+".new"), filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := Admit(t.Context(), source(there), dir, nil); !errors.Is(err, sign.ErrUntrusted) {
		t.Errorf("an unknown key is not the first thing that is wrong: %v", err)
	}
	if err := Admit(t.Context(), source(here), dir, nil); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("a changed gpuckpt.json is not the first thing that is wrong: %v", err)
	}
}

// Memory in pieces is compared by any policy: a piece is a blob of the node, and may be anybody's.
func TestPiecesAreCompared(t *testing.T) {
	n := node(t)
	n.Restore.Policy = config.Always
	dir, blobs, below := dump(t, n), t.TempDir(), t.TempDir()
	memory := make([]byte, images.BlockBytes)
	files, err := images.ListDirs(dir)
	if err != nil {
		t.Fatal(err)
	}
	with := append(files, images.File{Name: "pages-1.img", Bytes: images.BlockBytes, Data: bytes.NewReader(memory)})
	_, manifest, err := sign.WithManifest(t.Context(), slices.DeleteFunc(slices.Clone(with), func(f images.File) bool { return sign.IsSeal(f.Name) }))
	if err != nil {
		t.Fatal(err)
	}
	at := func(own []byte, rest *Rest) error {
		t.Helper()
		to := images.Pointer{Digest: digest.FromBytes(own), Bytes: uint64(len(own))}
		write(t, filepath.Join(blobs, to.Digest.Encoded()), string(own))
		write(t, filepath.Join(below, images.PieceFile("pages-1.img", 0)), to.String())
		return admit(t.Context(), source(n), true, []string{dir, below}, rest, func() ([]images.File, error) { return listed(images.ListImage(blobs, dir, below)) })
	}
	for _, seal := range files {
		if sign.IsSeal(seal.Name) {
			if err := os.Remove(seal.Path); err != nil {
				t.Fatal(err)
			}
		}
	}
	others := bytes.Repeat([]byte("secret  "), images.BlockBytes/8)
	if err := at(memory, nil); !errors.Is(err, images.ErrDamaged) {
		t.Errorf("without a manifest: %v", err)
	}
	write(t, filepath.Join(dir, sign.ManifestName), string(manifest))
	if err := at(memory, nil); err != nil {
		t.Error(err)
	}
	if err := at(others, nil); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("another's blob: %v", err)
	}
	for _, rest := range []*Rest{{}, {Mounted: true}} {
		defer rest.Close()
		if err := at(others, rest); err != nil {
			t.Fatal(err)
		}
		if err := rest.Wait(t.Context()); !errors.Is(err, sign.ErrChanged) {
			t.Errorf("another's blob, compared later: %v", err)
		}
		if err := rest.Need(t.Context(), func(string) ([]image.Part, bool) { return nil, false }); !errors.Is(err, sign.ErrChanged) {
			t.Errorf("another's blob, for CRIU: %v", err)
		}
	}
}

func listed(c *images.Checkpoint, err error) ([]images.File, error) {
	if err != nil {
		return nil, err
	}
	return c.Files, nil
}

// admitImage admits an image that has a checkpoint in a directory.
func admitImage(t *testing.T, read config.Source, dir string) error {
	t.Helper()
	return admit(t.Context(), read, true, []string{dir}, nil, func() ([]images.File, error) { return listed(images.ListImage("", dir)) })
}

// The memory of processes is compared later if there is a Rest, and else at once.
func TestRest(t *testing.T) {
	here := node(t)
	dir := t.TempDir()
	memory := filepath.Join(dir, "pages-1.img")
	write(t, memory, "")
	if err := os.Truncate(memory, images.BlockBytes+4096); err != nil {
		t.Fatal(err)
	}
	sealer, err := NewSealer(source(here), dir)
	if err == nil {
		err = sealer.Complete(t.Context(), dir, new(images.Metadata), nil)
	}
	if err != nil {
		t.Fatal(err)
	}
	admit := func(rest *Rest) error {
		t.Helper()
		t.Cleanup(rest.Close)
		return Admit(t.Context(), source(here), dir, rest)
	}
	first := func(string) ([]image.Part, bool) { return []image.Part{{Bytes: 4096}}, true }
	unknown := func(string) ([]image.Part, bool) { return nil, false }
	var rest Rest
	if err := errors.Join(rest.Wait(t.Context()), rest.Need(t.Context(), unknown), admit(&rest), rest.Need(t.Context(), first), rest.Need(t.Context(), unknown), rest.Wait(t.Context())); err != nil {
		t.Error(err)
	}
	f, err := os.OpenFile(memory, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt([]byte{1}, images.BlockBytes+1); err != nil {
		t.Fatal(err)
	}
	if err := Admit(t.Context(), source(here), dir, nil); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("without a Rest: %v", err)
	}
	rest = Rest{}
	if err := errors.Join(admit(&rest), rest.Need(t.Context(), first)); err != nil {
		t.Errorf("what has not changed: %v", err)
	}
	for how, err := range map[string]error{"Need": rest.Need(t.Context(), unknown), "Wait": rest.Wait(t.Context())} {
		if !errors.Is(err, sign.ErrChanged) || !errors.Is(err, images.ErrDamaged) {
			t.Errorf("%s: %v", how, err)
		}
	}
	// A file of another size is no business of a Rest.
	if err := f.Truncate(images.BlockBytes); err != nil {
		t.Fatal(err)
	}
	if err := admit(new(Rest)); !errors.Is(err, sign.ErrChanged) {
		t.Errorf("cut short: %v", err)
	}
}

// A signature over digests that prove nothing does not count for GPU state.
func TestOldDigests(t *testing.T) {
	n := node(t)
	dir := t.TempDir()
	for _, name := range []string{"gpu-1-0", "gpuckpt.json", "inventory.img"} {
		data, err := os.ReadFile(filepath.Join("../../../images/testdata/schema-1", name))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name), string(data))
	}
	signer, err := sign.ReadOrMakeSigner(n.Signing.Key)
	if err != nil {
		t.Fatal(err)
	}
	if err := sign.Write(t.Context(), dir, signer, nil, nil); err != nil {
		t.Fatal(err)
	}
	if err := Admit(t.Context(), source(n), dir, nil); !errors.Is(err, errOldDigests) || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("got %v", err)
	}
}

// Nor do they while the image arrives, by any policy: nothing else has compared the bytes by then.
func TestOldDigestsArrive(t *testing.T) {
	n := node(t)
	n.Restore.Policy = config.Always
	old := "../../../images/testdata/schema-1"
	var dirs, roots []string
	for range 2 {
		root := filepath.Join(t.TempDir(), "fs")
		roots, dirs = append(roots, root), append(dirs, filepath.Join(root, images.ImageDir))
		if err := os.MkdirAll(dirs[len(dirs)-1], 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"gpuckpt.json", "inventory.img"} {
		data, err := os.ReadFile(filepath.Join(old, name))
		if err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dirs[0], name), string(data))
	}
	state, err := os.ReadFile(filepath.Join(old, "gpu-1-0"))
	if err != nil {
		t.Fatal(err)
	}
	blobs, d := t.TempDir(), digest.FromBytes(state)
	write(t, filepath.Join(blobs, d.Encoded()), string(state))
	write(t, filepath.Join(dirs[1], images.PieceFile("gpu-1-0", 0)), images.Pointer{Digest: d, Bytes: uint64(len(state))}.String())
	f := feed.New()
	if err := f.Serve(filepath.Dir(roots[0]), blobs); err != nil {
		t.Fatal(err)
	}
	_, _, _, err = OpenImage(t.Context(), source(n), t.TempDir(), dirs, roots, new(Rest))
	if !errors.Is(err, errOldDigests) || !errdefs.IsFailedPrecondition(err) {
		t.Errorf("got %v", err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestUnusableKeys(t *testing.T) {
	n := node(t)
	dump(t, n)
	if err := os.Chmod(n.Signing.Key, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := NewSealer(source(n), t.TempDir()); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("a key that all can read: %v", err)
	}
	bad := filepath.Join(t.TempDir(), "bad.pub")
	write(t, bad, "no key")
	m := node(t, bad)
	if _, err := Keys(m); !errdefs.IsFailedPrecondition(err) || !strings.Contains(err.Error(), bad) {
		t.Errorf("a file without a key: %v", err)
	}
	m.Restore.Keys, m.Signing.Key = nil, ""
	if keys, err := Keys(m); err != nil || len(keys) > 0 {
		t.Errorf("a node without keys: %v, %v", keys, err)
	}
}

// A checkpoint whose files others could exchange once they are compared is not restored.
func TestFilesOfOthers(t *testing.T) {
	n := node(t)
	dir := dump(t, n)
	file := filepath.Join(dir, "inventory.img")
	for _, c := range []struct {
		path string
		mode os.FileMode
		uid  int
		own  bool
	}{{dir, 0o755, 0, true}, {dir, 0o777 | os.ModeSticky, 0, true}, {dir, 0o777, 0, false}, {dir, 0o700, 1000, false}, {file, 0o644, 0, true}, {file, 0o666, 0, false}, {file, 0o666 | os.ModeSticky, 0, false}, {file, 0o400, 1000, false}} {
		if err := errors.Join(os.Chmod(c.path, c.mode), os.Chown(c.path, c.uid, 0)); err != nil {
			t.Fatal(err)
		}
		if err := Admit(t.Context(), source(n), dir, nil); (err == nil) != c.own || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%+v: %v", c, err)
		}
		if err := errors.Join(os.Chmod(c.path, 0o700), os.Chown(c.path, 0, 0)); err != nil {
			t.Fatal(err)
		}
	}
	n.Restore.Policy = config.Always // which asks for no signature
	if err := errors.Join(os.Chmod(dir, 0o777), Admit(t.Context(), source(n), dir, nil)); err != nil {
		t.Error(err)
	}
}

// Nothing is signed in a directory where others could put files.
func TestDirectoryOfOthers(t *testing.T) {
	n := node(t)
	dir := t.TempDir()
	for _, c := range []struct {
		mode os.FileMode
		uid  int
		own  bool
	}{{0o755, 0, true}, {0o700, 0, true}, {0o775, 0, false}, {0o777, 0, false}, {0o777 | os.ModeSticky, 0, true}, {0o700, 1000, false}} {
		if err := errors.Join(os.Chmod(dir, c.mode), os.Chown(dir, c.uid, 0)); err != nil {
			t.Fatal(err)
		}
		if _, err := NewSealer(source(n), dir); (err == nil) != c.own || err != nil && !errdefs.IsFailedPrecondition(err) {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := NewSealer(source(n), filepath.Join(dir, "none")); err != nil {
		t.Errorf("a directory that is not there: %v", err)
	}
	n.Signing.Key = ""
	if _, err := NewSealer(source(n), dir); err != nil {
		t.Errorf("where nothing is signed: %v", err)
	}
}
