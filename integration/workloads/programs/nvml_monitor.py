# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""A program with CUDA, beside a process that watches the GPUs through NVML and has no CUDA.

The watcher answers each request with how many GPUs there are. NVML may answer an error after a
restore, until it is initialised again: that is what the watcher then does.
"""

import subprocess
import sys


def watch():
    import pynvml

    pynvml.nvmlInit()
    begun = 1
    for request in sys.stdin:
        for attempt in range(3):
            try:
                count = pynvml.nvmlDeviceGetCount()
                memory = [pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(i)).total for i in range(count)]
                break
            except pynvml.NVMLError as err:
                if attempt == 2:
                    raise
                print(f"# NVML answers {err}: it is initialised again", file=sys.stderr, flush=True)
                try:
                    pynvml.nvmlShutdown()
                except pynvml.NVMLError:
                    pass
                pynvml.nvmlInit()
                begun += 1
        print(request.strip(), count, sum(memory) >> 20, begun, flush=True)


def main():
    from workload import Record, say

    record = Record(__doc__)
    import torch

    watcher = subprocess.Popen([sys.executable, __file__, "watch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    counter = torch.full((1024,), 3, dtype=torch.int64, device="cuda")
    say("PyTorch", torch.__version__)
    before = "1"

    def flip():
        counter[511] ^= 1

    record.guards(flip)
    for number in range(record.steps):
        print(number, file=watcher.stdin, flush=True)
        answer = watcher.stdout.readline().split()
        if len(answer) != 4 or answer[0] != str(number) or int(answer[1]) < 1:
            raise RuntimeError(f"the watcher answers {answer}")
        if answer[3] != before:
            before = answer[3]
            say("NVML was initialised", before, "times")
        counter = (counter * 1103515245 + int(answer[1])) % 2147483647
        record.step(f"{int(counter.sum().item()):x}-{answer[1]}-{answer[2]}")
    record.done()


if __name__ == "__main__":
    watch() if sys.argv[1:2] == ["watch"] else main()
