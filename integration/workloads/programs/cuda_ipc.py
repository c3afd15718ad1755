# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Two processes that share a tensor on the GPU by CUDA IPC: torch.multiprocessing."""

from workload import Record, flip_bit, say


def add(requests, answers):
    """Adds to the shared tensor what it is asked to."""
    tensor = requests.get()
    while True:
        tensor += requests.get()
        answers.put(int(tensor.sum().item()))


def main():
    record = Record(__doc__)
    import torch
    import torch.multiprocessing

    spawn = torch.multiprocessing.get_context("spawn")
    requests, answers = spawn.Queue(), spawn.Queue()
    adder = spawn.Process(target=add, args=(requests, answers), daemon=True)
    adder.start()
    tensor = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    requests.put(tensor)
    say("PyTorch", torch.__version__)
    record.guards(lambda: flip_bit(tensor))
    for number in range(record.steps):
        requests.put(number)
        theirs = answers.get(timeout=120)
        ours = int(tensor.sum().item())
        if ours != theirs:
            raise RuntimeError(f"the processes see {ours} and {theirs}")
        record.step(f"{ours:x}")
    record.done()


if __name__ == "__main__":
    main()
