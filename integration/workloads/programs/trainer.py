# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama by transformers' Trainer with accelerate: processes with a GPU each, over NCCL.

The processes get what torchrun would set in their environment. --variant says how NCCL moves data:
nccl_setup.py.
"""

import os
import signal
import tempfile

from nccl_setup import RANKS, VARIANTS, prepare, start_others
from small_llama import WORDS, small_llama
from workload import Record, flip_bit, say, short, skip, tensor_bytes
from workload import state as found_in  # the callbacks have an argument of that name

LENGTH, BATCH, SAMPLES = 64, 4, 512


def train(torch, rank, port, steps, record=None):
    """Trains as one of the processes; the first one keeps the record."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
        WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS),
    )
    import accelerate
    import transformers

    class Lines(transformers.TrainerCallback):
        """Writes a line a step: of the state before it, and the loss of all processes."""

        def on_train_begin(self, args, state, control, model=None, **kwargs):
            if record:
                say("transformers", transformers.__version__, "accelerate", accelerate.__version__, args.parallel_mode)
                record.guards(lambda: flip_bit(model.lm_head.weight))

        def on_step_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
            self.found = found_in(model, optimizer)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if record and "loss" in logs:  # the last one has the training's mean instead
                record.step(f"{self.found}-{float(logs['loss']).hex()}-{float(logs['grad_norm']).hex()}")

    random = torch.Generator().manual_seed(2)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=random)
    model = small_llama(torch, 256, 4)
    with tempfile.TemporaryDirectory() as directory:
        arguments = transformers.TrainingArguments(
            output_dir=directory, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=1e-4, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, ddp_find_unused_parameters=False, seed=1,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=[{"input_ids": one, "labels": one} for one in words],
            callbacks=[Lines()],
        )
        trainer.train()
    import torch.distributed as dist

    if dist.get_world_size() != RANKS:
        raise RuntimeError(f"{dist.get_world_size()} processes trained, not {RANKS}")
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
    if torch.cuda.device_count() < RANKS:
        skip(f"it needs {RANKS} GPUs")
    port = start_others(work, variant, record.steps)
    record.done(train(torch, 0, port, record.steps, record))


if __name__ == "__main__":
    main()
