# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Kernels of Triton: one that is tuned by a benchmark, one with tensor cores, one compiled late.

What the benchmark chooses makes no difference to the integers.
"""

import torch
import triton
import triton.language as tl

from workload import Record, flip_bit, say, short, tensor_bytes


@triton.autotune(configs=[triton.Config({"BLOCK": 256}), triton.Config({"BLOCK": 1024})], key=["n"])
@triton.jit
def mix(x, y, n, k, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(x + at, mask=inside, other=0)
    tl.store(y + at, (value * 1103515245 + k + at) % 2147483647, mask=inside)


@triton.jit
def mix_late(x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n, other=0)
    tl.store(x + at, (value * 48271 + 11) % 2147483647, mask=at < n)


@triton.jit
def product(a, b, c, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    place = at[:, None] * SIZE + at[None, :]
    tl.store(c + place, tl.dot(tl.load(a + place), tl.load(b + place)))


def main():
    record = Record(__doc__)
    say("PyTorch", torch.__version__, "Triton", triton.__version__)
    n = 1 << 16
    x, y = torch.arange(n, dtype=torch.int64, device="cuda"), torch.empty(n, dtype=torch.int64, device="cuda")
    random = torch.Generator(device="cuda").manual_seed(1)
    a = torch.randn(64, 64, generator=random, device="cuda", dtype=torch.float16)
    # It turns and does not forget.
    b = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(2)))[0].half().cuda()
    c = torch.empty(64, 64, device="cuda", dtype=torch.float32)
    record.guards(lambda: flip_bit(x))
    for number in range(record.steps):
        mix[lambda meta: (triton.cdiv(n, meta["BLOCK"]),)](x, y, n, number)
        x, y = y, x
        if number >= record.steps * 3 // 4:
            mix_late[(n // 512,)](x, n, BLOCK=512)
        product[(1,)](a, b, c, SIZE=64)
        a = (c * 64 / c.norm()).half()
        record.step(short(tensor_bytes([x, a])))
    record.done()


if __name__ == "__main__":
    main()
