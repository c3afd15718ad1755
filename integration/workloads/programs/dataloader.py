# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains on what a DataLoader's workers make: 4 processes, pinned memory, kept between epochs.

The workers are forked after CUDA began. A batch has more than 1 MiB, and comes through a file of
/dev/shm without a name.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch.utils.data import DataLoader, Dataset

from workload import Record, flip_bit, say, short, state

PIXELS = 96


class Images(Dataset):
    """Images that follow from their number."""

    def __len__(self):
        return 256

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, PIXELS, PIXELS, generator=generator), index % 10


def main():
    record = Record(__doc__)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    model = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(3 * PIXELS * PIXELS, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    loader = DataLoader(
        Images(), batch_size=16, shuffle=True, num_workers=4, pin_memory=True, persistent_workers=True,
        generator=torch.Generator().manual_seed(2),
    )
    say("PyTorch", torch.__version__)
    record.guards(lambda: flip_bit(model[1].weight))
    while record.number < record.steps:
        for images, labels in loader:
            if not images.is_pinned():
                raise RuntimeError("a batch is not in pinned memory")
            found = state(model, optimizer)
            images = images.cuda(non_blocking=True)
            labels = labels.cuda(non_blocking=True)
            optimizer.zero_grad()
            loss = loss_of(model(images), labels)
            loss.backward()
            optimizer.step()
            record.step(f"{found}-{loss.item().hex()}")
            if record.number == record.steps:
                break
    record.done(short(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).encode())


if __name__ == "__main__":
    main()
