# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with DistributedDataParallel over NCCL: processes with a GPU each, that wait for each other.

Between two lines there are five all-reduces of 2 MiB beside those of the training, without a pause on
the GPUs: while the first process writes its line, the kernels of the others wait for it.

--variant says how NCCL moves data: nccl_setup.py.

With one GPU they share it: over sockets each takes the others for processes of another host
(NCCL_HOSTID), which NCCL does not ask for its GPU; over shm if this NCCL lets them
(NCCL_MULTI_RANK_GPU_ENABLE).
"""

import signal

from nccl_setup import RANKS, VARIANTS, join, prepare, start_others
from workload import Record, flip_bit, say, short, skip, state, tensor_bytes


def may_share(variant):
    """Whether NCCL, which torch has loaded, lets two ranks have the same GPU."""
    if variant == "sockets":
        return True
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libnccl.so" in line}
    return variant == "shm" and any(b"MULTI_RANK_GPU_ENABLE" in open(path, "rb").read() for path in paths)


def train(torch, rank, port, steps, record=None):
    """Trains as one of the processes; the first one keeps the record."""
    dist = join(torch, rank, port)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[torch.cuda.current_device()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2 + rank)
    numbers = torch.arange(1 << 18, dtype=torch.int64, device="cuda") * (rank + 1)
    if record:
        say("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "all processes run, on", torch.cuda.device_count(), "GPUs")
        record.guards(lambda: flip_bit(numbers))
    for number in range(steps):
        found = state(model, optimizer)
        x = torch.randn(64, 256, generator=data, device="cuda")
        labels = torch.randint(10, (64,), generator=data, device="cuda")
        optimizer.zero_grad()
        loss = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        for turn in range(5):
            numbers.mul_(1103515245).add_(5 * number + turn + rank).remainder_(2147483647)
            dist.all_reduce(numbers)
        losses = torch.zeros(RANKS, device="cuda")
        dist.all_gather_into_tensor(losses, loss.detach().reshape(1))
        if record:
            all_losses = "-".join(one.hex() for one in losses.tolist())
            record.step(f"{found}-{all_losses}-{int(numbers.sum().item()):x}")
    digests = [None] * RANKS
    dist.all_gather_object(digests, short(tensor_bytes(model.parameters())))
    return "-".join(digests).encode()


def work(rank, variant, port, steps):
    """Another process than the first."""
    train(prepare(variant, rank), rank, port, steps)
    signal.pause()


def main():
    record = Record(__doc__, variants=list(VARIANTS))
    variant = record.args.variant
    torch = prepare(variant, 0)
    if torch.cuda.device_count() < RANKS and not may_share(variant):
        skip(f"it needs {RANKS} GPUs")
    port = start_others(work, variant, record.steps)
    record.done(train(torch, 0, port, record.steps, record))


if __name__ == "__main__":
    main()
