# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts UDP packets in a PyTorch tensor on the GPU.

Each packet adds one to the tensor, which begins at 100; the answer is its
value. "ready" on standard output says that it listens.
"""

import argparse
import socket

import torch


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()

    counter = torch.full((1,), 100, dtype=torch.int64, device=args.device)
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    listener.bind(("127.0.0.1", args.port))
    print(f"PyTorch {torch.__version__}", flush=True)
    print("ready", flush=True)
    while True:
        _, sender = listener.recvfrom(1500)
        counter += 1
        listener.sendto(str(counter.item()).encode(), sender)


if __name__ == "__main__":
    main()
