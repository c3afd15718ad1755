# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two processes that stream numbers to each other over TCP, faster than they take them.

Every connection's queues are full at any moment, in both directions, as those of NCCL over sockets:
what is on its way must come back. It needs no GPU.
"""

import multiprocessing
import os
import signal
import socket
import threading
import time
import zlib

from workload import Record, say

CONNECTIONS, BLOCK = 4, 1 << 16


def block(number):
    """The bytes that one direction sends as its number-th."""
    return number.to_bytes(8, "little") * (BLOCK // 8)


def receive(connection):
    """The next block of a connection."""
    data = bytearray(BLOCK)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the other process has closed a connection")
        view = view[count:]
    return bytes(data)


def send(connection):
    """Sends blocks until the process ends."""
    number = 0
    while True:
        number += 1
        try:
            connection.sendall(block(number))
        except OSError as e:
            say("send:", e)
            os.kill(os.getpid(), signal.SIGKILL)


def stream(connection):
    threading.Thread(target=send, args=(connection,), daemon=True).start()


def take(connections, number, sum=0):
    """Takes the number-th block of each connection, and returns a checksum of it and what was before."""
    for connection in connections:
        data = receive(connection)
        if data != block(number):
            raise ValueError(f"block {number} is wrong")
        sum = zlib.crc32(data, sum)
    return sum


def other(port):
    """The second process."""
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(CONNECTIONS)]
    for connection in connections:
        stream(connection)
    number = 0
    while True:
        number += 1
        take(connections, number)
        time.sleep(0.005)  # slower than what is sent


def main():
    record = Record(__doc__)
    listener = socket.create_server(("127.0.0.1", 0))
    process = multiprocessing.get_context("spawn").Process(target=other, args=(listener.getsockname()[1],), daemon=True)
    process.start()
    connections = [listener.accept()[0] for _ in range(CONNECTIONS)]
    listener.close()
    for connection in connections:
        stream(connection)
    number = sum = 0
    for _ in range(record.steps):
        for _ in range(20):
            number += 1
            sum = take(connections, number, sum)
        record.step(f"{sum:08x}")
    record.done()


if __name__ == "__main__":
    main()
