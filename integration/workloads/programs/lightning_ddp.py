# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with Lightning's Trainer and its strategy ddp: processes with a GPU each, over NCCL.

Lightning starts this program once more for each further process, with LOCAL_RANK in its environment.
--variant says how NCCL moves data: nccl_setup.py.
"""

import os
import signal
import sys

from nccl_setup import RANKS, VARIANTS, prepare
from workload import Record, flip_bit, say, short, skip, state, tensor_bytes

RANK = int(os.environ.get("LOCAL_RANK", "0"))


def train(torch, record):
    """Trains as one of the processes, and returns what is left of all of them."""
    import pytorch_lightning as lightning
    import torch.distributed as dist
    from pytorch_lightning.plugins.environments import LightningEnvironment

    class Network(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))

        def training_step(self, batch, number):
            x, labels = batch
            return torch.nn.functional.cross_entropy(self.layers(x), labels)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    class Lines(lightning.Callback):
        """Writes a line a step: of the state before it, and the losses of all processes."""

        def on_train_start(self, trainer, model):
            if trainer.world_size != RANKS:
                raise RuntimeError(f"{trainer.world_size} processes train, not {RANKS}")
            if RANK == 0:
                say("Lightning", lightning.__version__, "all processes run, this one on", model.device)
                record.guards(lambda: flip_bit(model.layers[0].weight))

        def on_train_batch_start(self, trainer, model, batch, number):
            self.found = state(model, trainer.optimizers[0])

        def on_train_batch_end(self, trainer, model, outputs, batch, number):
            losses = torch.zeros(RANKS, device=model.device)
            dist.all_gather_into_tensor(losses, outputs["loss"].detach().reshape(1))
            if RANK == 0:
                record.step("-".join([self.found, *(one.hex() for one in losses.tolist())]))

        def on_train_end(self, trainer, model):
            self.left = [None] * RANKS
            dist.all_gather_object(self.left, short(tensor_bytes(model.parameters())))

    random = torch.Generator().manual_seed(2)
    data = torch.utils.data.TensorDataset(
        torch.randn(1024, 256, generator=random), torch.randint(10, (1024,), generator=random)
    )
    lines = Lines()
    trainer = lightning.Trainer(
        accelerator="gpu", devices=RANKS, strategy="ddp", max_epochs=-1, max_steps=record.steps, callbacks=[lines],
        deterministic=True, benchmark=False, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # where mpi4py is installed, Lightning would start MPI
    )
    trainer.fit(Network(), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, num_workers=0))
    return "-".join(lines.left).encode()


def main():
    if RANK > 0:
        sys.argv += ["--file", os.devnull]  # the first process keeps the record
    record = Record(__doc__, variants=list(VARIANTS))
    torch = prepare(record.args.variant, RANK)
    if torch.cuda.device_count() < RANKS:
        skip(f"it needs {RANKS} GPUs")
    left = train(torch, record)
    if RANK > 0:
        signal.pause()
    record.done(left)


if __name__ == "__main__":
    main()
