// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package node is what the agent does on its node: it asks the kubelet for a checkpoint, and has the
// node's own gpuckpt make an image of it and push that.
package node

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// Node is the node that the agent runs on.
type Node struct {
	// Root is where the node's root is mounted.
	Root string
	// Program is the node's gpuckpt, as the node sees it; empty: where it was installed.
	Program string
	// Kubelet is https://ADDRESS:PORT, and TokenFile the token that it is asked with.
	Kubelet, TokenFile string
	// CAFile has the authority of the kubelet's certificate; Insecure asks a kubelet whose
	// certificate nobody has signed.
	CAFile   string
	Insecure bool
	// Containerd is the socket of the node's containerd, as the node sees it.
	Containerd string
	// PlainHTTP talks HTTP to registries.
	PlainHTTP bool
	// Env is what the node's gpuckpt gets beside PATH.
	Env []string
}

// Checkpoint has the kubelet checkpoint a container, and returns the archive, as the node sees it.
// seconds bounds it, 0 is the kubelet's own limit. On an error the container is as it was.
func (n Node) Checkpoint(ctx context.Context, namespace, pod, container string, seconds int64) (archive string, err error) {
	client, err := n.client()
	if err != nil {
		return "", err
	}
	defer client.CloseIdleConnections()
	token, err := os.ReadFile(n.TokenFile)
	if err != nil {
		return "", fmt.Errorf("read the agent's token: %w", err)
	}
	address := n.Kubelet + "/checkpoint/" + url.PathEscape(namespace) + "/" + url.PathEscape(pod) + "/" + url.PathEscape(container)
	if seconds > 0 {
		address += fmt.Sprintf("?timeout=%d", seconds)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, address, nil)
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	answer, err := client.Do(request)
	if unknown := (x509.UnknownAuthorityError{}); errors.As(err, &unknown) {
		return "", fmt.Errorf("ask the kubelet: %w: give the agent the authority of the kubelet's certificate (--kubelet-ca), or --kubelet-insecure", err)
	}
	if err != nil {
		return "", fmt.Errorf("ask the kubelet: %w", err)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(io.LimitReader(answer.Body, 1<<20))
	if err != nil {
		return "", fmt.Errorf("ask the kubelet: %w", err)
	}
	if answer.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the kubelet answered %s: %s", answer.Status, bytes.TrimSpace(body))
	}
	var made struct{ Items []string }
	if err := json.Unmarshal(body, &made); err != nil || len(made.Items) != 1 {
		return "", fmt.Errorf("the kubelet answered %q", body)
	}
	return made.Items[0], nil
}

func (n Node) client() (*http.Client, error) {
	config := &tls.Config{InsecureSkipVerify: n.Insecure} //nolint:gosec // a flag asks for it
	if !n.Insecure {
		data, err := os.ReadFile(n.CAFile)
		if err != nil {
			return nil, fmt.Errorf("read the authority of the kubelet's certificate: %w", err)
		}
		config.RootCAs = x509.NewCertPool()
		config.RootCAs.AppendCertsFromPEM(data)
	}
	return &http.Client{Transport: &http.Transport{TLSClientConfig: config}}, nil
}

// Built is an image that was made of an archive.
type Built struct {
	Digest   string `json:"digest"`
	Bytes    int64  `json:"bytes"`
	GPUBytes int64  `json:"gpuBytes"`
}

// Build makes an image of an archive in the node's containerd, and removes the archive.
func (n Node) Build(ctx context.Context, archive, image string) (b Built, err error) {
	defer func() { err = errors.Join(err, os.Remove(filepath.Join(n.Root, archive))) }()
	return b, n.gpuckpt(ctx, "", &b, "image", "build", "kubernetes-archive:"+archive, image)
}

// Captured is the image that was made of a container of a pod.
type Captured struct {
	Name          string  `json:"name"`
	Image         string  `json:"image"`
	PausedSeconds float64 `json:"pausedSeconds"`
	BuildSeconds  float64 `json:"buildSeconds"`
	Built
}

// CheckpointPod makes images of all running containers of a pod, in one cut; each is called as image
// is, with "-" and the container's name behind. seconds bounds it, 0 is no bound. On an error all
// containers are as they were, and there is no image.
func (n Node) CheckpointPod(ctx context.Context, namespace, pod, image string, seconds int64) ([]Captured, error) {
	if seconds > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(seconds)*time.Second)
		defer cancel()
	}
	var made struct{ Containers []Captured }
	err := n.gpuckpt(ctx, "", &made, "checkpoint", "--pod", namespace+"/"+pod, "--image", image, "--leave-running")
	return made.Containers, err
}

// Discard removes an image from the node's containerd.
func (n Node) Discard(ctx context.Context, image string) error {
	return n.gpuckpt(ctx, "", nil, "rm", image)
}

// Recover resumes what checkpoints that were killed with their agent have left paused.
func (n Node) Recover(ctx context.Context) error {
	return n.gpuckpt(ctx, "", nil, "recover")
}

// Push pushes an image, with the credentials of a docker config.json. It returns the bytes that the
// registry lacked.
func (n Node) Push(ctx context.Context, image string, credentials []byte) (sent int64, err error) {
	dir, err := os.MkdirTemp(filepath.Join(n.Root, "run"), "gpuckpt-agent-")
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), credentials, 0o600); err != nil {
		return 0, err
	}
	args := []string{"image", "push", image}
	if n.PlainHTTP {
		args = append(args, "--plain-http")
	}
	var pushed struct{ MovedBytes int64 }
	err = n.gpuckpt(ctx, strings.TrimPrefix(dir, filepath.Clean(n.Root)), &pushed, args...)
	return pushed.MovedBytes, err
}

// gpuckpt runs the node's gpuckpt in the node's root.
func (n Node) gpuckpt(ctx context.Context, dockerConfig string, answer any, args ...string) error {
	program, err := n.program()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, program, append(args, "--json", "--address", n.Containerd, "--namespace", "k8s.io")...)
	cmd.SysProcAttr, cmd.Dir = &syscall.SysProcAttr{Chroot: n.Root}, "/"
	cmd.Env = append([]string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "DOCKER_CONFIG=" + dockerConfig}, n.Env...)
	// It undoes what it has begun, if it is not killed.
	cmd.Cancel, cmd.WaitDelay = func() error { return cmd.Process.Signal(syscall.SIGTERM) }, time.Minute
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil {
		var said struct{ Error string }
		if json.Unmarshal(errs.Bytes(), &said) == nil && said.Error != "" {
			return errors.New(said.Error)
		}
		return fmt.Errorf("gpuckpt %s: %w: %s", strings.Join(args, " "), err, bytes.TrimSpace(errs.Bytes()))
	}
	if answer == nil {
		return nil
	}
	if err := json.Unmarshal(out.Bytes(), answer); err != nil {
		return fmt.Errorf("gpuckpt %s printed %q: %w", strings.Join(args, " "), out.Bytes(), err)
	}
	return nil
}

// program returns where gpuckpt install has put gpuckpt.
func (n Node) program() (string, error) {
	if n.Program != "" {
		return n.Program, nil
	}
	var record struct{ Prefix string }
	data, err := os.ReadFile(filepath.Join(n.Root, "var/lib/gpuckpt/installed.json"))
	if err == nil {
		err = json.Unmarshal(data, &record)
	}
	if err != nil || record.Prefix == "" {
		return "", fmt.Errorf("gpuckpt is not installed on this node: %w", err)
	}
	return filepath.Join(record.Prefix, "bin", "gpuckpt"), nil
}
