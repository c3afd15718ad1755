# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Four sequences of greedy decoding by a model of the shape of Llama 3 8B, split over GPUs.

Processes with a GPU each have their part of the heads, of the inner layers and of the last layer. A
step is one word for each sequence: a CUDA graph with the two all-reduces of each of 32 layers, and
the all-gather of what the ranks have found.

--variant says how NCCL moves data: nccl_setup.py.
"""

import os
import signal

from nccl_setup import RANKS, join, prepare, start_others
from workload import Record, checksum, flip_bit, say, skip

VARIANTS = ["cumem", "ipc"]
FIRST_WORDS = [11, 222, 3333, 44444]
SLOTS = len(FIRST_WORDS)
CACHE_GIB = 1  # of all ranks
EVERY = 20  # steps between two that have the checksum of the weights and of the cache


class Rank:
    """One rank's part of the model, with all that a step needs at fixed addresses, and its graph."""

    def __init__(self, torch, dist, rank):
        import llama

        self.torch, self.dist, self.llama = torch, dist, llama
        length = llama.sequence_length(CACHE_GIB, SLOTS)
        self.model = llama.Decoder(SLOTS, length, seed=1 + rank, parts=RANKS)
        dist.broadcast(self.model.embedding, 0)

        def numbers(*shape):
            return torch.zeros(shape, dtype=torch.int64, device="cuda")

        self.words, self.place, self.found = numbers(SLOTS), numbers(1), numbers(1)
        self.places = torch.arange(length, device="cuda")
        # Of each rank: the bits of its best logits, their words, the digest of all its logits, its checksum.
        self.sent = numbers(2 * SLOTS + 2)
        self.all = numbers(RANKS * len(self.sent))
        # Each logit counts with an odd factor of its own, as in checksum.
        self.factors = (2 * torch.arange(SLOTS * llama.WORDS // RANKS, device="cuda") + 1).view(SLOTS, -1)
        self.graph = self.capture()

    def capture(self):
        """Returns the graph of a step, after NCCL, cuBLAS and the kernels have been used without one."""
        torch = self.torch
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Only this thread is held to what a capture allows: NCCL's watchdog is another one.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.step()
        torch.cuda.synchronize()
        self.words.copy_(torch.tensor(FIRST_WORDS, device="cuda"))
        self.place.zero_()
        self.model.cache.zero_()
        return graph

    def whole(self, part):
        """Makes the sum over all ranks of a part, in place."""
        self.dist.all_reduce(part)
        return part

    def step(self):
        """Adds one word to each sequence. Nothing here depends on a value that the host has."""
        torch, model, head = self.torch, self.model, self.llama.HEAD
        here = (self.places == self.place).view(-1, 1)
        later = self.places > self.place

        def attend(number, q, k, v):
            keys, values = model.cache[number]
            k = model.rotate(k.view(SLOTS, model.kv_heads, 1, head), self.place)
            keys.copy_(torch.where(here, k, keys))
            values.copy_(torch.where(here, v.view(SLOTS, model.kv_heads, 1, head), values))
            q = model.rotate(q.view(SLOTS, model.kv_heads, model.heads // model.kv_heads, head), self.place)
            scores = (q @ keys.transpose(-1, -2) / head**0.5).float().masked_fill(later, float("-inf"))
            return (scores.softmax(-1).to(q.dtype) @ values).reshape(SLOTS, model.heads * head)

        with torch.no_grad():
            logits = model.logits(model.embedding[self.words], attend, self.whole)
            words = logits.argmax(-1, keepdim=True)
            best = logits.gather(-1, words).float().view(torch.int32).to(torch.int64)
            digest = (logits.view(torch.int16).to(torch.int64) * self.factors).sum()
            self.sent.copy_(torch.cat((best.view(-1), words.view(-1), digest.view(1), self.found)))
            self.dist.all_gather_into_tensor(self.all, self.sent)
            ranks = self.all.view(RANKS, -1)
            best = ranks[:, :SLOTS].to(torch.int32).contiguous().view(torch.float32).argmax(0)
            words = ranks[:, SLOTS : 2 * SLOTS].gather(0, best.view(1, -1)).view(-1)
            self.words.copy_(words + best * (self.llama.WORDS // RANKS))
            self.place.add_(1).remainder_(len(self.places))

    def next(self, look):
        """Takes a step, and returns its text; look is whether that has the ranks' checksums."""
        self.found.fill_(int(checksum(self.model.tensors()), 16) if look else 0)
        self.graph.replay()
        numbers = self.torch.cat((self.words, self.all)).tolist()  # it waits for the step
        words, ranks = numbers[:SLOTS], numbers[SLOTS:]
        digests, found = ranks[2 * SLOTS :: len(self.sent)], ranks[2 * SLOTS + 1 :: len(self.sent)]
        text = [str(word) for word in words] + [f"{digest % (1 << 64):x}" for digest in digests]
        if look:
            text += [f"{one:x}" for one in found]
        return "-".join(text)


def decode(torch, rank, port, steps, record=None):
    """Decodes as one of the processes; the first one keeps the record."""
    one = Rank(torch, join(torch, rank, port), rank)
    if record:
        say("NCCL", ".".join(map(str, torch.cuda.nccl.version())), "on", torch.cuda.device_count(), "GPUs,", torch.cuda.memory_allocated() >> 20, "MiB on each")
        record.guards(lambda: flip_bit(one.model.layers[17]["up"]))
    for number in range(steps):
        text = one.next(number % EVERY == 0)
        if record:
            record.step(text)
    return one.next(True).encode()


def begin(variant, rank):
    """Sets up what is read before CUDA starts, and returns torch."""
    # Nothing but this thread is to touch the GPU during a capture.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    return prepare(variant, rank, small=False)


def work(rank, variant, port, steps):
    """Another process than the first."""
    decode(begin(variant, rank), rank, port, steps)
    signal.pause()


def main():
    record = Record(__doc__, variants=VARIANTS)
    variant = record.args.variant
    torch = begin(variant, 0)
    if torch.cuda.device_count() < RANKS:
        skip(f"it needs {RANKS} GPUs")
    port = start_others(work, variant, record.steps)
    record.done(decode(torch, 0, port, record.steps, record))


if __name__ == "__main__":
    main()
