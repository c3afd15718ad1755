# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with DistributedDataParallel: two processes on one GPU, gloo over TCP between them.

Both connections and the store's are established, with both ends in this container.
"""

import os
import signal
import socket

from workload import Record, deterministic_torch, flip_bit, say, short, state, tensor_bytes


def train(rank, port, steps, record=None):
    """Trains as one of the two processes; the first one keeps the record."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch = deterministic_torch()
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2 + rank)
    if record:
        say("both processes run")
        record.guards(lambda: flip_bit(model.module[0].weight))
    for _ in range(steps):
        found = state(model, optimizer)
        x = torch.randn(64, 256, generator=data, device="cuda")
        labels = torch.randint(10, (64,), generator=data, device="cuda")
        optimizer.zero_grad()
        loss = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        both = [torch.zeros(1), torch.zeros(1)]
        dist.all_gather(both, loss.detach().cpu().reshape(1))
        if record:
            record.step("-".join((found, *(one.item().hex() for one in both))))
    weights = [None, None]
    dist.all_gather_object(weights, short(tensor_bytes(model.parameters())))
    return "-".join(weights).encode()


def work(port, steps):
    """The second process."""
    train(1, port, steps)
    signal.pause()


def main():
    record = Record(__doc__)
    import multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=work, args=(port, record.steps), daemon=True)
    other.start()
    record.done(train(0, port, record.steps, record))


if __name__ == "__main__":
    main()
