# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a convolutional network with automatic mixed precision: autocast to fp16 and GradScaler.

The scale grows every 7 steps and falls when a gradient overflows; it is part of each step's value.
"""

from workload import Record, deterministic_torch, flip_bit, short, state, tensor_bytes


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, stride=2, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(64 * 16 * 16, 10),
    ).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=7)
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2)
    record.guards(lambda: flip_bit(model[0].weight))
    for _ in range(record.steps):
        found = state(model, optimizer)
        images = torch.randn(32, 3, 32, 32, generator=data, device="cuda")
        labels = torch.randint(10, (32,), generator=data, device="cuda")
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = loss_of(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record.step(f"{found}-{loss.item().hex()}-{int(scaler.get_scale())}")
    record.done(short(tensor_bytes(model.state_dict().values())).encode())


if __name__ == "__main__":
    main()
