# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Forks after CUDA began, as a server that preloads its model does (gunicorn --preload).

Three children stay and answer over pipes; one more is forked every 10 steps, also after a restore,
and ends. No child may use the GPU: each hashes what its parent computed there.
"""

import hashlib
import os

from workload import Record, deterministic_torch, flip_bit, tensor_bytes


def serve(requests, answers, state):
    """Answers each line with a digest of all before; state is what the parent had at the fork."""
    digest = hashlib.sha256(state)
    with os.fdopen(requests) as lines, os.fdopen(answers, "w") as out:
        for line in lines:
            digest.update(line.encode())
            print(digest.hexdigest()[:8], file=out, flush=True)


class Child:
    """A forked process and the pipes to it."""

    others = []

    def __init__(self, state):
        their_requests, requests = os.pipe()
        answers, their_answers = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(requests)
                os.close(answers)
                for other in Child.others:  # else its end would not be seen
                    other.requests.close()
                serve(their_requests, their_answers, state)
            finally:
                os._exit(0)
        os.close(their_requests)
        os.close(their_answers)
        self.requests, self.answers = os.fdopen(requests, "w"), os.fdopen(answers)
        Child.others.append(self)

    def ask(self, line):
        print(line, file=self.requests, flush=True)
        answer = self.answers.readline().strip()
        if not answer:
            raise RuntimeError(f"child {self.pid} has ended")
        return answer

    def end(self):
        self.requests.close()
        self.answers.close()
        Child.others.remove(self)
        if os.waitpid(self.pid, 0)[1] != 0:
            raise RuntimeError(f"child {self.pid} failed")


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    values = torch.arange(1 << 16, dtype=torch.int64, device="cuda")
    children = [Child(bytes([number])) for number in range(3)]
    record.guards(lambda: flip_bit(values))
    for number in range(record.steps):
        values.mul_(1103515245).add_(number).remainder_(2147483647)
        total = int(values.sum().item())
        answers = [child.ask(total + place) for place, child in enumerate(children)]
        if number % 10 == 9:
            child = Child(tensor_bytes([values]))
            answers.append(child.ask(total))
            child.end()
        record.step(f"{total:x}-" + "-".join(answers))
    record.done()


if __name__ == "__main__":
    main()
