# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors of ever other sizes, by an allocator of PyTorch's that is not the default.

expandable maps physical memory into reserved addresses (CUDA VMM); async leaves it to
cudaMallocAsync and its pools.
"""

import os

from workload import Record, deterministic_torch, flip_bit

SETTINGS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}


def main():
    record = Record(__doc__, variants=tuple(SETTINGS))
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = os.environ["PYTORCH_ALLOC_CONF"] = SETTINGS[record.args.variant]
    torch = deterministic_torch()
    kept = [torch.arange(1 << 20, dtype=torch.int64, device="cuda") for _ in range(24)]
    if record.args.variant == "async":
        if torch.cuda.get_allocator_backend() != "cudaMallocAsync":
            raise RuntimeError(f"the allocator is {torch.cuda.get_allocator_backend()}")
    elif not any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot()):
        raise RuntimeError("no segment is expandable")
    side = torch.cuda.Stream()
    seed = 7
    record.guards(lambda: flip_bit(kept[13]))
    for number in range(record.steps):
        seed = (seed * 48271 + 11) % 2147483647
        place, size = seed % len(kept), (seed % 4096 + 1) << 10
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            grown = torch.arange(size, dtype=torch.int64, device="cuda") * seed
        torch.cuda.current_stream().wait_stream(side)
        grown.record_stream(torch.cuda.current_stream())
        grown += kept[place].sum()
        kept[place] = grown
        if number % 50 == 49:
            torch.cuda.empty_cache()
        total = 0
        for tensor in kept:
            tensor.mul_(1103515245).add_(number).remainder_(2147483647)
            total = (total * 31 + int(tensor.sum().item())) % (1 << 61)
        record.step(f"{total:x}")
    record.done()


if __name__ == "__main__":
    main()
