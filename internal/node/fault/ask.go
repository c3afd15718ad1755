// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build faults

package fault

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"strconv"
	"time"
)

// variable names the socket at which a test listens.
const variable = "GPUCKPT_FAULTS"

// At returns when the test lets the operation go on. The error is the one that the test wants.
func At(p Point) error {
	socket := os.Getenv(variable)
	if socket == "" {
		return nil
	}
	p.Pid = os.Getpid()
	if p.Container == "" {
		p.Container = os.Getenv(variable + "_AS")
	}
	conn, err := net.Dial("unix", socket)
	if err != nil {
		return nil // the test is over
	}
	defer conn.Close()
	question, err := json.Marshal(p)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(question, '\n')); err != nil {
		return nil
	}
	answer, err := io.ReadAll(conn)
	if err != nil || len(answer) == 0 {
		return nil
	}
	return errors.New(string(answer))
}

// Bound returns how long something is waited for: what the test wants, from a file beside its socket,
// where that is less.
func Bound(d time.Duration) time.Duration {
	text, err := os.ReadFile(os.Getenv(variable) + ".bound")
	if err != nil {
		return d
	}
	want, err := time.ParseDuration(string(text))
	if err != nil {
		return d
	}
	return min(d, want)
}

// Env is what a process of this program's that is started without an environment needs to ask, too.
func Env() []string {
	return []string{variable + "=" + os.Getenv(variable), variable + "_AS=child of " + strconv.Itoa(os.Getpid())}
}
