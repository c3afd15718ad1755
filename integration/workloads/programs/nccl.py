# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with DistributedDataParallel over NCCL, as the only process of its group.

torchrun starts one process so. Its store is a TCP server that the process is a client of.
"""

import os
import socket

from workload import Record, deterministic_torch, flip_bit, say, short, state, tensor_bytes


def main():
    record = Record(__doc__)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch = deterministic_torch()
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    say("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2)
    numbers = torch.arange(1 << 18, dtype=torch.int64, device="cuda")
    record.guards(lambda: flip_bit(numbers))
    for number in range(record.steps):
        found = f"{state(model, optimizer)}-{short(tensor_bytes([numbers]))}"
        x = torch.randn(64, 256, generator=data, device="cuda")
        labels = torch.randint(10, (64,), generator=data, device="cuda")
        optimizer.zero_grad()
        loss = loss_of(model(x), labels)
        loss.backward()
        optimizer.step()
        numbers.mul_(1103515245).add_(number).remainder_(2147483647)
        dist.all_reduce(numbers)
        gathered = torch.empty_like(numbers)
        dist.all_gather_into_tensor(gathered, numbers)
        record.step(f"{found}-{loss.item().hex()}-{int(gathered.sum().item()):x}")
    record.done(short(tensor_bytes(model.parameters())).encode())


if __name__ == "__main__":
    main()
