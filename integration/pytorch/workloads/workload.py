# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the workloads have in common: their options and their record.

Each step is one line "step NUMBER VALUE", in --file and on standard output, in this order. The
value follows from all steps before it and is the same in each run. After the last step comes
"done DIGEST"; the program then waits to be killed, so that its file can be read through /proc.
"""

import argparse
import hashlib
import signal
import time


class Record:
    """Writes the steps of a workload, and gives them time."""

    def __init__(self, description):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--steps", type=int, default=200)
        parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
        parser.add_argument("--file", default="/tmp/steps")
        parser.add_argument("--device", choices=["cuda", "none"], default="cuda", help="none: only of some programs")
        self.args = parser.parse_args()
        self.steps = self.args.steps
        self.number = 0
        self.digest = hashlib.sha256()
        self.file = open(self.args.file, "w", encoding="ascii")

    def step(self, value):
        """Ends a step; value is text without spaces."""
        self.number += 1
        self.digest.update(value.encode())
        line = f"step {self.number} {value}"
        print(line, file=self.file, flush=True)
        print(line, flush=True)
        time.sleep(self.args.pause)

    def done(self, data=b""):
        """Ends the workload; data is what is left of it, such as its weights."""
        self.digest.update(data)
        self.file.flush()
        print("done", self.digest.hexdigest(), flush=True)
        while True:
            signal.pause()


def say(*words):
    """Writes a line that is no part of the record."""
    print("#", *words, flush=True)


def short(data):
    """Returns a digest of bytes that is short enough for a line."""
    return hashlib.sha256(data).hexdigest()[:16]
