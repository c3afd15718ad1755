// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

package registry

import (
	"cmp"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/client"
	cimages "github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/imgcrypt/v2"
	"github.com/containerd/imgcrypt/v2/images/encryption"
	"github.com/containerd/imgcrypt/v2/images/encryption/parsehelpers"
	"github.com/containerd/platforms"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/gpuckpt/gpuckpt/images/annotations"
	"github.com/gpuckpt/gpuckpt/images/oci"
	"github.com/gpuckpt/gpuckpt/integration/harness"
)

// decoderKeys names the directory of keys for a test program that containerd starts as its decoder.
const decoderKeys = "GPUCKPT_TEST_DECODER_KEYS"

// decode does what imgcrypt's ctd-decoder does, by imgcrypt's own functions: it decrypts a layer
// that comes in, as the payload says that containerd passes it in descriptor 3.
func decode(keys string) error {
	data, err := io.ReadAll(os.NewFile(3, "payload"))
	if err != nil {
		return err
	}
	var wrapped anypb.Any
	if err := proto.Unmarshal(data, &wrapped); err != nil {
		return err
	}
	var payload imgcrypt.Payload
	if err := json.Unmarshal(wrapped.GetValue(), &payload); err != nil {
		return err
	}
	files, err := filepath.Glob(filepath.Join(keys, "*"))
	if err != nil {
		return err
	}
	config, err := parsehelpers.CreateDecryptCryptoConfig(parsehelpers.EncArgs{Key: files}, nil)
	if err != nil {
		return err
	}
	_, plain, _, err := encryption.DecryptLayer(config.DecryptConfig, os.Stdin, payload.Descriptor, false)
	if err != nil {
		return err
	}
	_, err = io.Copy(os.Stdout, plain)
	return err
}

// keyPair writes a private and a public key into a directory each.
func keyPair(t *testing.T) (private, public string) {
	t.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	write := func(kind string, der []byte, err error) string {
		t.Helper()
		file := filepath.Join(t.TempDir(), "key.pem")
		if err == nil {
			err = os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		return file
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	private = write("PRIVATE KEY", der, err)
	der, err = x509.MarshalPKIXPublicKey(key.Public())
	return private, write("PUBLIC KEY", der, err)
}

// An encrypted checkpoint goes through a registry: only who has the key gets it back, by gpuckpt, and, with GPU state in
// layers, by containerd as the kubelet has it decrypt. It is the one that was signed.
func TestEncrypted(t *testing.T) {
	t.Run("blobs", func(t *testing.T) { encrypted(t, "") })
	t.Run("layers", func(t *testing.T) { encrypted(t, "zstd") })
}

func encrypted(t *testing.T, compression string) {
	private, public := keyPair(t)
	other, _ := keyPair(t)
	s := serve(t, false)
	decoder, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	// The names of the processors are those that imgcrypt has payloads for.
	c := session.Own(t, harness.Options{Config: fmt.Sprintf(`
[stream_processors."io.containerd.ocicrypt.decoder.v1.tar"]
accepts = ["%[1]s+encrypted"]
returns = %[1]q
path = %[2]q
env = ["%[3]s=%[4]s"]
`, oci.Compression(cmp.Or(compression, "none")).MediaType(), decoder, decoderKeys, filepath.Dir(private))})
	k := start(t, c, harness.RunSpec{}, "pattern", "--bytes", "50331648", "--chunks", "3", "--seed", "7")
	k.Expect(t, "count", "101")
	ref := s.ref("job:1")
	made := asJSON[harness.CheckpointAnswer](t, c, "checkpoint", k.ID, "--image", ref, "--compression", cmp.Or(compression, "none"))
	k.MustRemove(t)

	undo := c.Configured(t, fmt.Sprintf("[encryption]\nrecipients = [%q]\n", public))
	pushed := asJSON[harness.TransferAnswer](t, c, "image", "push", ref)
	if pushed.Digest == made.Digest || pushed.MovedBytes == 0 {
		t.Errorf("gpuckpt image push answers %+v", pushed)
	}
	undo()

	forget(t, c)
	fails(t, c, nil, []string{"no key decrypts it", other}, "image", "pull", ref, "--no-unpack", "--decrypt-key", other)
	if _, err := c.Client().GetImage(t.Context(), ref); err == nil {
		t.Error("without its key the image was pulled")
	}
	// Nobody's key: the image comes as it is.
	gpuckpt(t, c, "image", "pull", ref, "--no-unpack")
	fails(t, c, nil, []string{"the layer is encrypted", "--decrypt-key"}, "image", "verify", ref)
	fails(t, c, nil, []string{"the image is encrypted", "--decrypt-key KEY"}, "restore", ref, "--name", "encrypted", "--snapshotter", c.Snapshotter())
	image, err := c.Client().GetImage(t.Context(), ref)
	if err != nil {
		t.Fatal(err)
	}
	m, err := cimages.Manifest(t.Context(), c.Client().ContentStore(), image.Target(), platforms.Default())
	if err != nil {
		t.Fatal(err)
	}
	ours, blobs := 0, 0
	for _, l := range m.Layers {
		if l.Annotations[annotations.Layer] != "" {
			ours++
		}
		if l.MediaType == oci.MediaTypeGPU+"+encrypted" {
			blobs++
		}
		if (l.Annotations[annotations.Layer] != "") != strings.HasSuffix(l.MediaType, "+encrypted") {
			t.Errorf("the layer %+v", l)
		}
	}
	if ours < 2 || (blobs > 0) != (compression == "") {
		t.Errorf("%d layers of the checkpoint, %d blobs", ours, blobs)
	}

	gpuckpt(t, c, "rm", ref)
	fails(t, c, nil, []string{"`gpuckpt image pull --decrypt-key KEY`"}, "image", "pull", ref, "--snapshotter", c.Snapshotter())
	back := asJSON[harness.TransferAnswer](t, c, "image", "pull", ref, "--decrypt-key", private, "--snapshotter", c.Snapshotter())
	if back.Digest != made.Digest {
		t.Errorf("pulled as %s, was %s", back.Digest, made.Digest)
	}
	gpuckpt(t, c, "image", "verify", ref)
	r := resume(t, c, ref, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "102")
	r.MustRemove(t)

	// As CRI pulls: containerd unpacks through its stream processors.
	forget(t, c)
	_, err = c.Client().Pull(t.Context(), ref, client.WithPullUnpack, client.WithPullSnapshotter(c.Snapshotter()), client.WithPlatform(platforms.DefaultString()),
		client.WithResolver(docker.NewResolver(docker.ResolverOptions{Hosts: docker.ConfigureDefaultRegistries(docker.WithPlainHTTP(docker.MatchLocalhost))})),
		client.WithUnpackOpts([]client.UnpackOpt{encryption.WithUnpackConfigApplyOpts(encryption.WithDecryptedUnpack(&imgcrypt.Payload{}))}))
	if err != nil {
		t.Fatal(err)
	}
	if compression == "" { // of blobs containerd decrypts nothing
		_, err := c.TryWork(t, harness.RunSpec{ID: "encrypted", Image: ref, Port: k.Port, GPUs: []int{0}, Args: []string{"gpuwork"}, Annotations: map[string]string{annotations.Restore: "true"}})
		harness.Says(t, err, "which has memory or GPU state, is not in")
		return
	}
	r = resume(t, c, ref, k.Port)
	r.Expect(t, "verify", "bad=0")
	r.Expect(t, "count", "102")
	r.MustRemove(t)
}
