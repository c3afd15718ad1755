# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small network under torch.profiler, which has CUPTI trace the GPU."""

from workload import Record, deterministic_torch, flip_bit, say, short, state, tensor_bytes


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loss_of = torch.nn.MSELoss()
    data = torch.Generator(device="cuda").manual_seed(2)
    record.guards(lambda: flip_bit(model[0].weight))

    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    )
    profiler.start()
    for _ in range(record.steps):
        found = state(model, optimizer)
        x = torch.randn(64, 256, generator=data, device="cuda")
        optimizer.zero_grad()
        loss = loss_of(model(x), x[:, :64])
        loss.backward()
        optimizer.step()
        record.step(f"{found}-{loss.item().hex()}")
    profiler.stop()
    say(len(profiler.events()), "events")
    record.done(short(tensor_bytes(model.parameters())).encode())


if __name__ == "__main__":
    main()
