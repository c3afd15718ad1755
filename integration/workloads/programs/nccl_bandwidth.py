# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the all-reduce of two processes over NCCL, a GPU each, once in each step.

As nccl-tests' all_reduce_perf does: 1 GiB of float32, 5 all-reduces to warm up, 20 timed. The step
has the sums alone. The bus bandwidth is a line of its own before it, "bandwidth GB/s".
"""

import signal
import time

from nccl_setup import RANKS, join, prepare, start_others
from workload import Record, checksum, flip_bit, say, skip

VARIANTS = ["cumem", "ipc"]
ROWS, COLUMNS = 1 << 10, 1 << 18  # 1 GiB of float32
WARM, TIMED = 5, 20


def measure(torch, dist, data):
    """Returns the bus bandwidth of an all-reduce, in GB/s."""
    for _ in range(WARM):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(TIMED):
        dist.all_reduce(data)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / TIMED
    return 2 * (RANKS - 1) / RANKS * data.nbytes / seconds / 1e9


def run(torch, rank, port, steps, record=None):
    """Measures as one of the processes; the first one keeps the record."""
    dist = join(torch, rank, port)
    data = torch.zeros(ROWS, COLUMNS, device="cuda")
    rows = torch.arange(ROWS, dtype=torch.float32, device="cuda").view(ROWS, 1)
    columns = torch.arange(COLUMNS, dtype=torch.int64, device="cuda")
    both = torch.zeros(RANKS * 2, dtype=torch.int64, device="cuda")
    if record:
        say("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "on", torch.cuda.device_count(), "GPUs")
        record.guards(lambda: flip_bit(data))
    for number in range(steps):
        found = int(checksum([data]), 16)
        # Whole numbers below 2,048: the sum of all ranks, which each further all-reduce multiplies, is exact.
        data.copy_((columns * (2 * (number + rank) + 1)).remainder(1021).float())
        data.add_(rows)
        rate = measure(torch, dist, data)
        sums = torch.tensor([found, int(checksum([data]), 16)], dtype=torch.int64, device="cuda")
        dist.all_gather_into_tensor(both, sums)
        values = both.tolist()
        if record:
            print("bandwidth", f"{rate:.2f}", flush=True)
            record.step("-".join(f"{value:x}" for value in values))


def work(rank, variant, port, steps):
    """Another process than the first."""
    run(prepare(variant, rank, small=False), rank, port, steps)
    signal.pause()


def main():
    record = Record(__doc__, variants=VARIANTS)
    variant = record.args.variant
    torch = prepare(variant, 0, small=False)
    if torch.cuda.device_count() < RANKS:
        skip(f"it needs {RANKS} GPUs")
    port = start_others(work, variant, record.steps)
    run(torch, 0, port, record.steps, record)
    record.done()


if __name__ == "__main__":
    main()
