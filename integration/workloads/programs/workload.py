# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the workloads have in common: their options and their record.

Each step is one line "step NUMBER VALUE", in --file and on standard output, in this order. The
value follows from all steps before it and is the same in each run. After the last step comes
"done DIGEST"; the program then waits to be killed, so that its file can be read through /proc.
The C programs have the same options and write the same lines: record.h.
"""

import argparse
import hashlib
import os
import signal
import sys
import time

# An exit status that says: this machine has not what the program needs.
SKIPPED = 77


class Record:
    """Writes the steps of a workload, and gives them time."""

    def __init__(self, description, variants=()):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--steps", type=int, default=200)
        parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
        parser.add_argument("--file", default="/tmp/steps")
        parser.add_argument("--device", choices=["cuda", "none"], default="cuda", help="none: only of some programs")
        parser.add_argument(
            "--flip", type=int, default=0, help="flip one bit on the GPU before this step, as if it had been lost"
        )
        if variants:
            parser.add_argument("--variant", choices=variants, default=variants[0])
        self.args = parser.parse_args()
        self.steps = self.args.steps
        self.number = 0
        self.digest = hashlib.sha256()
        self.flip = None
        self.file = open(self.args.file, "w", encoding="ascii")

    def guards(self, flip):
        """Takes a function that flips one bit of the program's state, for --flip."""
        self.flip = flip
        if self.args.flip == self.number + 1:
            flip()

    def step(self, value):
        """Ends a step; value is text without spaces."""
        self.number += 1
        self.digest.update(value.encode())
        line = f"step {self.number} {value}"
        print(line, file=self.file, flush=True)
        print(line, flush=True)
        time.sleep(self.args.pause)
        if self.flip and self.args.flip == self.number + 1:
            self.flip()

    def done(self, data=b""):
        """Ends the workload; data is what is left of it, such as its weights."""
        self.digest.update(data)
        self.file.flush()
        print("done", self.digest.hexdigest(), flush=True)
        while True:
            signal.pause()


def say(*words):
    """Writes a line that is no part of the record."""
    print("#", *words, flush=True)


def skip(*words):
    """Ends a program that this machine cannot run, and says why."""
    print("skipped:", *words, flush=True)
    sys.exit(SKIPPED)


def short(data):
    """Returns a digest of bytes that is short enough for a line."""
    return hashlib.sha256(data).hexdigest()[:16]


def deterministic_torch(seed=1):
    """Returns torch, held to algorithms that have the same results in each run."""
    # Without it cuBLAS is not deterministic; it is read when CUDA starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    say("PyTorch", torch.__version__)
    return torch


def tensor_bytes(tensors):
    """Returns the bytes of tensors, whatever their type."""
    import torch

    return b"".join(
        t.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes() for t in tensors
    )


def state(model, optimizer=None):
    """Returns a number that one bit of a network on the GPU changes, and of its optimizer.

    A step that begins with it tells of a bit that was lost since the step before, also of one that
    the step's own rounding would hide.
    """
    import torch

    tensors = list(model.state_dict().values())
    for kept in optimizer.state.values() if optimizer else ():
        tensors += [value for value in kept.values() if isinstance(value, torch.Tensor)]
    data = torch.cat([t.detach().reshape(-1).view(torch.uint8) for t in tensors if t.is_cuda])
    return checksum([torch.nn.functional.pad(data, (0, -data.numel() % 4))])


def flip_bit(tensor):
    """Flips the lowest bit of a byte in the middle of a tensor, in place."""
    import torch

    with torch.no_grad():
        data = tensor.detach().reshape(-1).view(torch.uint8)
        data[tensor.nbytes // 2] ^= 1


def checksum(tensors):
    """Returns a number that one bit of large tensors changes; the GPU computes it.

    Each word of 32 bits counts with an odd factor of its own. So a flipped bit changes the sum by
    an odd multiple of a power of two up to 2^31, which is no multiple of 2^61.
    """
    import torch

    total, piece = 0, 1 << 25
    for tensor in tensors:
        words = tensor.detach().view(-1).view(torch.int32)
        for begin in range(0, words.numel(), piece):
            part = words[begin : begin + piece].to(torch.int64)
            factor = torch.arange(begin, begin + part.numel(), device=part.device, dtype=torch.int64)
            total = (total * 31 + int((part * (2 * factor + 1)).sum().item())) % (1 << 61)
    return f"{total:x}"
