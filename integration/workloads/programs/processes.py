# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Python's multiprocessing beside CUDA: pools by fork and spawn, a queue, semaphores.

The forked processes begin after CUDA did. None but the first uses it.
"""

import multiprocessing

from workload import Record, say


class Counter:
    """A number that follows from all that were added to it."""

    def __init__(self):
        self.value = 3

    def add(self, number):
        self.value = (self.value * 1103515245 + number) % 2147483647
        return self.value

    def flip(self):
        self.value ^= 1


class CUDACounter:
    """Many of them, on the GPU."""

    def __init__(self):
        import torch

        self.values = torch.arange(1024, dtype=torch.int64, device="cuda")
        say("PyTorch", torch.__version__)

    def add(self, number):
        self.values = (self.values * 1103515245 + number) % 2147483647
        return int(self.values.sum().item())

    def flip(self):
        self.values[511] ^= 1


def square(n):
    return n * n % 99991


def produce(queue, wanted, lock, made):
    """Puts a number into the queue whenever one is wanted."""
    number = 7
    while True:
        wanted.acquire()
        number = (number * 48271 + 11) % 2147483647
        with lock:
            made.value += 1
        queue.put(number)


def main():
    record = Record(__doc__)
    counter = Counter() if record.args.device == "none" else CUDACounter()
    fork, spawn = multiprocessing.get_context("fork"), multiprocessing.get_context("spawn")
    queue, wanted, lock, made = fork.Queue(), fork.Semaphore(0), fork.Lock(), fork.Value("q", 0)
    producer = fork.Process(target=produce, args=(queue, wanted, lock, made), daemon=True)
    producer.start()
    with fork.Pool(2) as forked, spawn.Pool(2) as spawned:
        say("all processes run")
        record.guards(counter.flip)
        for _ in range(record.steps):
            wanted.release()
            number = queue.get(timeout=60)
            value = counter.add(number)
            low = [value % k for k in range(2, 10)]
            squares = forked.map_async(square, low).get(timeout=60)
            squares += spawned.map_async(square, squares).get(timeout=60)
            with lock:
                total = made.value
            record.step(f"{value:x}-{sum(squares):x}-{total}")
        record.done()


if __name__ == "__main__":
    main()
