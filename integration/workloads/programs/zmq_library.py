# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""The little of pyzmq that notebook.py needs, over libzmq itself: for a Python without pyzmq.

$GPUCKPT_TEST_ZMQ is libzmq.so.5's path. Without it there is an ImportError, as without pyzmq.
"""

import ctypes
import errno
import os

PUB, SUB, REQ, REP, DEALER, ROUTER = range(1, 7)
SUBSCRIBE, RCVMORE, RCVTIMEO, LAST_ENDPOINT = 6, 13, 27, 32
SNDMORE = 2

try:
    _library = ctypes.CDLL(os.environ["GPUCKPT_TEST_ZMQ"], use_errno=True)
except (KeyError, OSError) as error:
    raise ImportError(f"libzmq: {error}") from error
for _name in ("zmq_ctx_new", "zmq_socket", "zmq_msg_data"):
    getattr(_library, _name).restype = ctypes.c_void_p
_library.zmq_msg_size.restype = ctypes.c_size_t


class Again(OSError):
    """Nothing came within RCVTIMEO."""


def zmq_version():
    numbers = [ctypes.c_int() for _ in range(3)]
    _library.zmq_version(*map(ctypes.byref, numbers))
    return ".".join(str(n.value) for n in numbers)


def _call(function, *args):
    """Calls until no signal interrupts it."""
    while (result := function(*args)) == -1:
        number = ctypes.get_errno()
        if number == errno.EINTR:
            continue
        raise (Again if number == errno.EAGAIN else OSError)(number, os.strerror(number))
    return result


class Context:
    def __init__(self):
        self._context = ctypes.c_void_p(_library.zmq_ctx_new())

    def socket(self, kind):
        return Socket(_library.zmq_socket(self._context, kind))


class Socket:
    def __init__(self, socket):
        if not socket:
            raise OSError(ctypes.get_errno(), "no socket")
        self._socket = ctypes.c_void_p(socket)

    def bind_to_random_port(self, address):
        _call(_library.zmq_bind, self._socket, f"{address}:*".encode())
        bound = ctypes.create_string_buffer(256)
        size = ctypes.c_size_t(len(bound))
        _call(_library.zmq_getsockopt, self._socket, LAST_ENDPOINT, bound, ctypes.byref(size))
        return int(bound.value.rpartition(b":")[2])

    def connect(self, address):
        _call(_library.zmq_connect, self._socket, address.encode())

    def setsockopt(self, option, value):
        data = value if isinstance(value, bytes) else bytes(ctypes.c_int(value))
        _call(_library.zmq_setsockopt, self._socket, option, data, ctypes.c_size_t(len(data)))

    def send(self, data, flags=0):
        _call(_library.zmq_send, self._socket, data, ctypes.c_size_t(len(data)), flags)

    def send_multipart(self, parts):
        for part in parts[:-1]:
            self.send(part, SNDMORE)
        self.send(parts[-1])

    def recv(self):
        message = (ctypes.c_uint64 * 8)()  # zmq_msg_t: 64 bytes, aligned as a pointer
        _library.zmq_msg_init(message)
        try:
            _call(_library.zmq_msg_recv, message, self._socket, 0)
            return ctypes.string_at(_library.zmq_msg_data(message), _library.zmq_msg_size(message))
        finally:
            _library.zmq_msg_close(message)

    def recv_multipart(self):
        parts = [self.recv()]
        more, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        while True:
            _call(_library.zmq_getsockopt, self._socket, RCVMORE, ctypes.byref(more), ctypes.byref(size))
            if not more.value:
                return parts
            parts.append(self.recv())
