# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a network by one CUDA graph: forward, backward, dropout and the optimizer's step."""

from workload import Record, deterministic_torch, flip_bit, short, state, tensor_bytes


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    model = torch.nn.Sequential(
        torch.nn.Linear(512, 1024), torch.nn.GELU(), torch.nn.Dropout(0.1), torch.nn.Linear(1024, 64)
    ).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
    loss_of = torch.nn.MSELoss()
    data = torch.Generator(device="cuda").manual_seed(2)
    x, y = torch.zeros(128, 512, device="cuda"), torch.zeros(128, 64, device="cuda")

    def fill():
        x.normal_(generator=data)
        y.normal_(generator=data)

    # PyTorch wants some steps on a stream of their own before it records one.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            fill()
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(x), y).backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()

    record.guards(lambda: flip_bit(model[0].weight))
    for _ in range(record.steps):
        found = state(model, optimizer)
        fill()
        graph.replay()
        record.step(f"{found}-{loss.item().hex()}")
    record.done(short(tensor_bytes(model.parameters())).encode())


if __name__ == "__main__":
    main()
