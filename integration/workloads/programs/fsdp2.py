# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with FSDP2: weights, gradients and optimizer in shards over processes with a GPU each, over NCCL.

Each layer's weights are gathered before they are used, in bfloat16, and its gradients are reduced and
scattered in float32. --variant says how NCCL moves data: nccl_setup.py.
"""

import signal

from nccl_setup import RANKS, VARIANTS, join, prepare, start_others
from workload import Record, checksum, flip_bit, say, short, skip, tensor_bytes

WIDTH, LAYERS, BATCH = 1024, 6, 32


def shards(model, optimizer=None):
    """Returns this rank's parts of the weights, and of what the optimizer keeps on the GPU."""
    kept = list(model.parameters())
    for of_one in optimizer.state.values() if optimizer else ():
        kept += of_one.values()
    parts = (value.to_local() if hasattr(value, "to_local") else value for value in kept)
    return [part for part in parts if part.is_cuda]


def network(torch):
    """Returns a network in shards, the same one in all processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.LayerNorm(WIDTH)
            self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
            self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x):
            return x + self.narrow(torch.nn.functional.gelu(self.wide(self.norm(x))))

    model = torch.nn.Sequential(*(Layer() for _ in range(LAYERS)), torch.nn.Linear(WIDTH, 64)).cuda()
    how = {
        "mesh": init_device_mesh("cuda", (RANKS,)),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }
    for layer in model:
        fully_shard(layer, **how)
    return fully_shard(model, **how)


def train(torch, rank, port, steps, record=None):
    """Trains as one of the processes; the first one keeps the record."""
    dist = join(torch, rank, port)
    model = network(torch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2 + rank)
    if record:
        say("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "all processes run, on", torch.cuda.device_count(), "GPUs")
        record.guards(lambda: flip_bit(shards(model)[0]))
    for _ in range(steps):
        # Of all ranks: what each has in its shards before the step.
        found = [None] * RANKS
        dist.all_gather_object(found, checksum(shards(model, optimizer)))
        x = torch.randn(BATCH, WIDTH, generator=data, device="cuda")
        labels = torch.randint(64, (BATCH,), generator=data, device="cuda")
        optimizer.zero_grad()
        loss = loss_of(model(x).float(), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        losses = torch.zeros(RANKS, device="cuda")
        dist.all_gather_into_tensor(losses, loss.detach().reshape(1))
        if record:
            record.step("-".join([*found, *(one.hex() for one in losses.tolist()), norm.item().hex()]))
    digests = [None] * RANKS
    dist.all_gather_object(digests, short(tensor_bytes(shards(model))))
    return "-".join(digests).encode()


def work(rank, variant, port, steps):
    """Another process than the first."""
    train(prepare(variant, rank), rank, port, steps)
    signal.pause()


def main():
    record = Record(__doc__, variants=list(VARIANTS))
    variant = record.args.variant
    torch = prepare(variant, 0)
    if torch.cuda.device_count() < RANKS:
        skip(f"it needs {RANKS} GPUs")
    port = start_others(work, variant, record.steps)
    record.done(train(torch, 0, port, record.steps, record))


if __name__ == "__main__":
    main()
