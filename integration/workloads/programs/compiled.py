# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a network that torch.compile compiled, by default or with CUDA graphs (reduce-overhead).

Compilation has a pool of worker processes. A second function is compiled late, by the pool that
came back. No floating-point sum is left to a kernel that a benchmark chooses among several: the
products are cuBLAS's, and the sums are of integers.
"""

import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor")

import torch

from workload import Record, flip_bit, say, short, state


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(64, 128, bias=False)
        self.second = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.first(x)) * 0.5)


def scramble(n):
    return (n * 1664525 + 1013904223 + n.sum()) % 2147483648


def scramble_late(n):
    return (n * 22695477 + 1 + n.sum() // 3) % 2147483648


def main():
    record = Record(__doc__, variants=("default", "reduce-overhead"))
    torch.manual_seed(1)
    network = Network().cuda()
    compile_it = lambda function: torch.compile(function, mode=record.args.variant)
    compiled, mix, mix_late = compile_it(network), compile_it(scramble), compile_it(scramble_late)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    data = torch.Generator(device="cuda").manual_seed(2)
    numbers = torch.arange(4096, dtype=torch.int64, device="cuda")
    say("PyTorch", torch.__version__)
    record.guards(lambda: flip_bit(network.second.weight))
    for _ in range(record.steps):
        torch.compiler.cudagraph_mark_step_begin()
        found = state(network, optimizer)
        x = torch.randn(64, 64, generator=data, device="cuda")
        target = torch.randn(64, 64, generator=data, device="cuda")
        optimizer.zero_grad()
        y = compiled(x)
        y.backward((y.detach() - target) / 64)
        optimizer.step()
        late = record.number >= record.steps * 3 // 4
        # The next replay of a graph overwrites its result.
        numbers = (mix_late if late else mix)(numbers).clone()
        weights = b"".join(p.detach().cpu().numpy().tobytes() for p in network.parameters())
        record.step(found + "-" + short(weights + numbers.cpu().numpy().tobytes()))
    record.done()


if __name__ == "__main__":
    main()
