# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a network on made-up data and tells the loss of every step, bit for bit.

Two runs with the same arguments on the same GPU write the same: everything
random comes from --seed, and PyTorch is held to deterministic algorithms. Each
step is one line "step NUMBER LOSS", the loss as float.hex() has it and after it
a number over all weights and momenta as the step found them. It is both in
--file and on standard output, in this order. After the last step comes
"done DIGEST", the SHA-256 of the trained weights; the program then waits to be
killed, so that its file can be read through /proc.

--model is a name out of torchvision.models, or "none": then there is no
network, no GPU and no PyTorch, and the losses are just random numbers.
"""

import argparse
import hashlib
import os
import random
import signal
import time


class NoNetwork:
    """Stands in for a network where there is no GPU: some numbers from a seed."""

    def __init__(self, args):
        self.random = random.Random(args.seed)

    def flip(self):
        self.random.random()

    def step(self):
        time.sleep(0.005)
        return self.random.random().hex()

    def digest(self):
        return hashlib.sha256(repr(self.random.getstate()).encode()).hexdigest()


class Network:
    """A network of torchvision's with its optimizer and its source of data."""

    def __init__(self, args):
        # Without it cuBLAS is not deterministic; it is read when CUDA starts.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import torch
        import torchvision

        self.torch = torch
        torch.manual_seed(args.seed)
        # Operations that have no deterministic variant warn, and do no harm
        # where they have but one order of execution. That two runs agree is
        # what the test finds out.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False

        self.shape = (args.batch, 3, args.pixels, args.pixels)
        self.model = torchvision.models.get_model(args.model, weights=None).to(args.device).train()
        # 0.1 for 256 images, as resnets are trained, scaled to the batch.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1 * args.batch / 256, momentum=0.9)
        self.loss = torch.nn.CrossEntropyLoss()
        self.device = args.device
        self.data = torch.Generator(device=args.device).manual_seed(args.seed + 1)
        print(f"PyTorch {torch.__version__}, torchvision {torchvision.__version__}", flush=True)

    def flip(self):
        from workload import flip_bit

        flip_bit(self.model.fc.weight)

    def step(self):
        from workload import state

        found = state(self.model, self.optimizer)
        images = self.torch.randn(self.shape, generator=self.data, device=self.device)
        labels = self.torch.randint(1000, self.shape[:1], generator=self.data, device=self.device)
        self.optimizer.zero_grad()
        loss = self.loss(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        return f"{loss.item().hex()}-{found}"

    def digest(self):
        digest = hashlib.sha256()
        for name, tensor in self.model.state_dict().items():
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet152")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pixels", type=int, default=128, help="width and height of an image")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--file", default="losses")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between steps")
    parser.add_argument("--flip", type=int, default=0, help="flip one bit of a weight before this step")
    args = parser.parse_args()

    training = NoNetwork(args) if args.model == "none" else Network(args)
    with open(args.file, "w", encoding="ascii") as file:
        for number in range(1, args.steps + 1):
            if number == args.flip:
                training.flip()
            line = f"step {number} {training.step()}"
            print(line, file=file, flush=True)
            print(line, flush=True)
            time.sleep(args.pause)
    print("done", training.digest(), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
