# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Processes that talk over NCCL, a GPU each: how NCCL moves data, and how they meet.

A variant is how NCCL moves data: shm over shared host memory, sockets over TCP, cumem by exported
handles (NCCL's own choice), ipc by CUDA IPC.
"""

import faulthandler
import os
import socket

from workload import deterministic_torch

RANKS = int(os.environ.get("RANKS", "2"))

VARIANTS = {
    "shm": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0", "NCCL_SHM_DISABLE": "1"},
    "cumem": {},
    "ipc": {"NCCL_CUMEM_ENABLE": "0"},
}

# /dev/shm has 64 MiB with ctr, which is too little for two ranks with NCCL's usual buffers. Over
# sockets it takes 34 MB for each rank even so.
SMALL = {"NCCL_BUFFSIZE": "1048576", "NCCL_MAX_NCHANNELS": "2"}


def prepare(variant, rank, small=True):
    """Sets NCCL up, before CUDA starts, and returns torch; small is whether its buffers are."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests name one GPU
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_DEBUG", "WARN")
    faulthandler.enable()
    os.environ.update(VARIANTS[variant], NCCL_NVLS_ENABLE="0", NCCL_MULTI_RANK_GPU_ENABLE="1")
    if small:
        os.environ.update(SMALL)
    if variant == "sockets":
        os.environ["NCCL_HOSTID"] = f"host-{rank}"
    return deterministic_torch()


def start_others(work, variant, steps):
    """Starts the other processes, which call work with their rank, the variant, a port and the steps, and returns the port."""
    import multiprocessing

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for rank in range(1, RANKS):
        multiprocessing.get_context("spawn").Process(target=work, args=(rank, variant, port, steps), daemon=True).start()
    return port


def join(torch, rank, port):
    """Makes the process one of them, on a GPU, and returns torch.distributed."""
    import torch.distributed as dist

    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    return dist
