# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with DistributedDataParallel over NCCL: two processes, a GPU each, that wait for each other.

Between two lines there are five all-reduces of 2 MiB beside those of the training, without a pause on
the GPUs: while the first process writes its line, the other's kernel waits for it.

--variant says how NCCL moves data: shm over shared host memory, sockets over TCP, cumem by exported
handles (NCCL's own choice), ipc by CUDA IPC.

With one GPU the two share it: over sockets each takes the other for a process of another host
(NCCL_HOSTID), which NCCL does not ask for its GPU; over shm if this NCCL lets them
(NCCL_MULTI_RANK_GPU_ENABLE).
"""

import faulthandler
import os
import signal
import socket

from workload import Record, deterministic_torch, flip_bit, say, short, skip, state, tensor_bytes

VARIANTS = {
    "shm": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_SHM_DISABLE": "1"},
    "cumem": {},
    "ipc": {"NCCL_CUMEM_ENABLE": "0"},
}


def prepare(variant, rank):
    """Sets NCCL up, before CUDA starts, and returns torch."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests name one GPU
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    faulthandler.enable()
    # /dev/shm has 64 MiB with ctr, which is too little for two ranks with NCCL's usual buffers. Over
    # sockets it takes 34 MB for each rank even so.
    os.environ.update(VARIANTS[variant], NCCL_NVLS_ENABLE="0", NCCL_MULTI_RANK_GPU_ENABLE="1", NCCL_BUFFSIZE="1048576", NCCL_MAX_NCHANNELS="2")
    if variant == "sockets":
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
    return deterministic_torch()


def may_share(variant):
    """Whether NCCL, which torch has loaded, lets two ranks have the same GPU."""
    if variant == "sockets":
        return True
    with open("/proc/self/maps") as maps:
        paths = {line.split()[-1] for line in maps if "libnccl.so" in line}
    return variant == "shm" and any(b"MULTI_RANK_GPU_ENABLE" in open(path, "rb").read() for path in paths)


def train(torch, rank, port, steps, record=None):
    """Trains as one of the two processes; the first one keeps the record."""
    import torch.distributed as dist

    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2 + rank)
    numbers = torch.arange(1 << 18, dtype=torch.int64, device="cuda") * (rank + 1)
    if record:
        say("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "both processes run, on", torch.cuda.device_count(), "GPUs")
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
        losses = torch.zeros(2, device="cuda")
        dist.all_gather_into_tensor(losses, loss.detach().reshape(1))
        if record:
            both = "-".join(one.hex() for one in losses.tolist())
            record.step(f"{found}-{both}-{int(numbers.sum().item()):x}")
    digests = [None, None]
    dist.all_gather_object(digests, short(tensor_bytes(model.parameters())))
    return "-".join(digests).encode()


def work(variant, port, steps):
    """The second process."""
    train(prepare(variant, 1), 1, port, steps)
    signal.pause()


def main():
    record = Record(__doc__, variants=list(VARIANTS))
    variant = record.args.variant
    torch = prepare(variant, 0)
    if torch.cuda.device_count() < 2 and not may_share(variant):
        skip("it needs two GPUs")
    import multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=work, args=(variant, port, record.steps), daemon=True)
    other.start()
    record.done(train(torch, 0, port, record.steps, record))


if __name__ == "__main__":
    main()
