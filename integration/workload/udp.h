// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Requests and replies as single UDP packets of text.

#ifndef GPUCKPT_UDP_H
#define GPUCKPT_UDP_H

enum { UDP_TEXT = 4096 };

// udp_listen binds a port on all addresses; ends the program with status 1 if it cannot.
int udp_listen(int port);

// udp_serve answers for ever: answer gets a request without its line end and writes a reply of less
// than UDP_TEXT bytes, which gets a line end.
__attribute__((noreturn)) void udp_serve(int socket,
                                         void (*answer)(void *arg, const char *request, char *reply),
                                         void *arg);

// udp_ask sends text to HOST:PORT and prints the reply; returns the exit status: 0, or 1 when none
// came within 5 s.
int udp_ask(const char *address, const char *text);

#endif
