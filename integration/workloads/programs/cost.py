# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the interposer costs a program that is not checkpointed: the same work with it and without, in turns.

    python3 cost.py --library .build/bin/libgpuckpt.so --out cost.json

Each turn is a process of its own: its start until CUDA works, steps of training a small transformer in
a loop without pauses, steps of greedy decoding by small kernels and by a CUDA graph, launches of an empty
kernel, and an all-reduce of one rank. All turns have the same four processors. A turn's time is the
least of its batches: what else the machine does only adds to it. A row has the median of the turns, and the
ratio; "spread" is how far those without the interposer are apart, as a ratio: what is less cannot be seen.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def timed(torch, work, count, batch):
    """The least time of a call of work, in microseconds, measured in batches."""
    for _ in range(batch):
        work()
    torch.cuda.synchronize()
    times = []
    for _ in range(count):
        began = time.perf_counter()
        for _ in range(batch):
            work()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / batch * 1e6)
    return min(times)


def turn():
    """Does the work once, and prints its times."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:4])
    import torch

    torch.zeros(1, device="cuda").item()
    found = {"start": (time.time() - float(os.environ["BEGAN"])) * 1e6}

    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, device="cuda")
    model = torch.nn.TransformerEncoder(layer, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 128, 512, device="cuda")

    def train():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    found["training step"] = timed(torch, train, 20, 10)

    weights = [torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(32)]
    words = torch.randn(1, 1024, device="cuda", dtype=torch.bfloat16)

    def decode():
        h = words
        for w in weights:
            h = torch.nn.functional.silu(h @ w) + h
        return h

    with torch.no_grad():
        found["decode step"] = timed(torch, decode, 40, 20)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            decode()
        found["decode step, CUDA graph"] = timed(torch, graph.replay, 40, 50)

    one = torch.zeros(1, device="cuda")
    found["kernel launch"] = timed(torch, one.zero_, 40, 2000)
    found["allocation of 64 MiB"] = timed(torch, allocate(torch), 10, 5)

    import torch.distributed as dist

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    data = torch.zeros(1 << 20, device="cuda")
    found["all-reduce of 4 MiB, one rank"] = timed(torch, lambda: dist.all_reduce(data), 20, 100)
    dist.destroy_process_group()
    print(json.dumps(found))


def allocate(torch):
    """Takes memory from the driver and gives it back, past PyTorch's pool."""

    def work():
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(64 << 20))
        torch.cuda.empty_cache()

    return work


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--library", required=True, help="libgpuckpt.so")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=3600, help="no round is begun that would end later")
    parser.add_argument("--out", help="write the result to this file, as JSON")
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        return turn()
    turns = {"with": [], "without": []}
    began = latest = time.time()
    for number in range(args.rounds + 1):
        took, latest = time.time() - latest, time.time()
        if number > 1 and latest + took > began + args.seconds:
            break
        for which in ("with", "without") if number % 2 else ("without", "with"):
            env = dict(os.environ, BEGAN=str(time.time()))
            if which == "with":
                env["LD_PRELOAD"] = os.path.abspath(args.library)
            done = subprocess.run([sys.executable, __file__, "--library", args.library, "--turn"], env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                sys.exit(f"{which} the interposer: {done.stderr[-2000:]}")
            if number:  # the first round finds nothing in the page cache
                turns[which].append(json.loads(done.stdout.splitlines()[-1]))
    rows = {}
    for name in turns["with"][0]:
        w, o = ([t[name] for t in turns[which]] for which in ("with", "without"))
        rows[name] = {
            "with_us": statistics.median(w), "without_us": statistics.median(o),
            "ratio": statistics.median(w) / statistics.median(o), "spread": max(o) / min(o),
        }
        print(f"{name:30} {rows[name]['with_us']:12.1f} us  {rows[name]['without_us']:12.1f} us  {rows[name]['ratio']:.3f}  spread {rows[name]['spread']:.3f}")
    if args.out:
        gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip()
        result = {"date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "gpu": gpu, "rounds": len(turns["with"]), "rows": rows, "turns": turns}
        with open(args.out, "w", encoding="utf-8") as out:
            json.dump(result, out, indent=1)


if __name__ == "__main__":
    sys.exit(main())
