// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package servers runs servers of Debian's packages, as their unit files do, has something asked of each that
// it must remember, and takes it there and back by runc's shim and by this project's, also beside a program
// that uses a GPU. What passes there must pass here. `make test-servers` runs all, `make test` a sample by
// this project's shim alone.
package servers

import "fmt"

// Script is the server's container's command: a client, and a program beside it, come before the server.
func (s Server) Script(beside string) string {
	client := s.Client
	if client != "" {
		client = fmt.Sprintf("(%s; echo ended >/run/ticks) &\n", client)
	}
	return prelude + "install -d -m 1777 /run/lock\n" + beside + client + s.Start
}

// Question asks the server for the nth time. It fails unless the answer is n and the client is served.
func (s Server) Question(n int) string {
	question := fmt.Sprintf("%sN=%d\nanswer=$(%s)\n[ \"$answer\" = %d ] || { echo \"it answers '$answer', not %d\"; exit 1; }\n", prelude, n, s.Ask, n, n)
	if s.Client != "" {
		question += "ticks=$(cat /run/ticks)\n" +
			`until now=$(cat /run/ticks); [ "$now" ] && [ "$now" != "$ticks" ]; do [ "$now" != ended ] || break; sleep 0.1; done
[ "$now" != ended ] || { echo "its client's connection has ended"; exit 1; }
`
	}
	return question
}

// Waiting waits until the server serves, and its client is served.
func (s Server) Waiting() string {
	waiting := prelude + "until { " + s.Ready + "; } >/dev/null 2>&1; do sleep 0.1; done\n"
	if s.Client != "" {
		waiting += "until [ -s /run/ticks ]; do sleep 0.1; done\n"
	}
	return waiting
}
