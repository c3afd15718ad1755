# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""A kernel such as Jupyter's and its client: cells of code over ZMQ, results published, a heartbeat.

The kernel is a process of its own with sockets on TCP, as ipykernel has them: a shell that answers
requests, a channel that publishes outputs, and a thread that echoes heartbeats. It needs pyzmq or
libzmq itself.
"""

import multiprocessing
import signal
import threading

from workload import Record, say, skip

try:
    import zmq
except ImportError:
    try:
        import zmq_library as zmq
    except ImportError:
        zmq = None

# What the cells are, on the GPU and without one: the first, each step's, and one that flips a bit.
CELLS = {
    "cuda": (
        "import torch; x = torch.arange(1 << 16, dtype=torch.int64, device='cuda'); print('made')",
        "x = (x * 1103515245 + {number}) % 2147483647; print(int(x.sum().item()))",
        "x[12345] ^= 1; print('flipped')",
    ),
    "none": (
        "x = list(range(1 << 12)); print('made')",
        "x = [(v * 1103515245 + {number}) % 2147483647 for v in x]; print(sum(x))",
        "x[1234] ^= 1; print('flipped')",
    ),
}


def echo(context, ports, bound):
    """Answers heartbeats."""
    beat = context.socket(zmq.REP)
    ports["beat"] = beat.bind_to_random_port("tcp://127.0.0.1")
    bound.set()
    while True:
        beat.send(beat.recv())


def kernel(pipe):
    """Runs cells until its end."""
    import contextlib
    import io

    context = zmq.Context()
    shell, output = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
    ports, bound = {}, threading.Event()
    ports["shell"] = shell.bind_to_random_port("tcp://127.0.0.1")
    ports["output"] = output.bind_to_random_port("tcp://127.0.0.1")
    threading.Thread(target=echo, args=(context, ports, bound), daemon=True).start()
    bound.wait()
    names = {}
    pipe.send(ports)
    while True:
        sender, number, code = shell.recv_multipart()
        text = io.StringIO()
        with contextlib.redirect_stdout(text):
            exec(code.decode(), names)
        output.send_multipart([b"stream", number, text.getvalue().strip().encode()])
        shell.send_multipart([sender, number, b"ok"])


def main():
    record = Record(__doc__)
    if zmq is None:
        skip("there is neither pyzmq nor GPUCKPT_TEST_ZMQ")
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=kernel, args=(theirs,), daemon=True)
    process.start()
    ports = ours.recv()
    context = zmq.Context()
    shell, output, beat = context.socket(zmq.DEALER), context.socket(zmq.SUB), context.socket(zmq.REQ)
    output.setsockopt(zmq.SUBSCRIBE, b"")
    for sock, name in ((shell, "shell"), (output, "output"), (beat, "beat")):
        sock.setsockopt(zmq.RCVTIMEO, 60_000)
        sock.connect(f"tcp://127.0.0.1:{ports[name]}")
    say("ZMQ", zmq.zmq_version())

    def run(number, code):
        """Runs a cell and returns what it printed."""
        shell.send_multipart([b"%d" % number, code.encode()])
        answer = shell.recv_multipart()
        if answer != [b"%d" % number, b"ok"]:
            raise RuntimeError(f"the kernel answers {answer}")
        while True:
            _, cell, text = output.recv_multipart()
            if int(cell) == number:
                return text.decode()

    def beats():
        beat.send(b"ping")
        if beat.recv() != b"ping":
            raise RuntimeError("the heartbeat is another")

    # A subscription takes a moment; what is published before is lost.
    output.setsockopt(zmq.RCVTIMEO, 1000)
    for attempt in range(60):
        try:
            run(1_000_000 + attempt, "print('there')")
            break
        except zmq.Again:
            say("no output yet")
    output.setsockopt(zmq.RCVTIMEO, 60_000)
    first, step, flip = CELLS[record.args.device]
    run(2_000_000, first)
    record.guards(lambda: run(3_000_000, flip))
    for number in range(record.steps):
        value = int(run(number, step.format(number=number)))
        beats()
        record.step(f"{value:x}")
    record.done()
    signal.pause()


if __name__ == "__main__":
    main()
