# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""A decoder of the shape of Llama 3 8B with made-up weights and a KV cache, in bfloat16.

32 layers of 4096, 32 heads that share 8 of keys and values, 128,256 words: 16 GB of weights, and
128 KiB of cache for each word of a sequence.
"""

import torch

LAYERS, WIDTH, HEADS, KV_HEADS, INNER, WORDS = 32, 4096, 32, 8, 14336, 128256
HEAD = WIDTH // HEADS
CACHE_BYTES = 2 * LAYERS * KV_HEADS * HEAD * 2  # of one word


class Decoder:
    """Keeps some sequences, each in a slot of the cache."""

    def __init__(self, slots, length, seed=1):
        random = torch.Generator(device="cuda").manual_seed(seed)

        def weight(*shape):
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=random)

        self.embedding = weight(WORDS, WIDTH)
        self.layers = [
            {
                "qkv": weight((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
                "out": weight(WIDTH, WIDTH),
                "gate": weight(INNER, WIDTH),
                "up": weight(INNER, WIDTH),
                "down": weight(WIDTH, INNER),
            }
            for _ in range(LAYERS)
        ]
        self.head = weight(WORDS, WIDTH)
        self.norm = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
        self.slots, self.length = slots, length
        self.cache = torch.zeros(
            LAYERS, 2, slots, KV_HEADS, length, HEAD, dtype=torch.bfloat16, device="cuda"
        )
        self.frequency = 500000.0 ** (-torch.arange(0, HEAD, 2, dtype=torch.float32, device="cuda") / HEAD)

    def tensors(self):
        """Returns the weights and the cache."""
        return [self.embedding, self.head, *(w for layer in self.layers for w in layer.values()), self.cache]

    def rotate(self, x, place):
        """Turns queries or keys by their place."""
        angle = place * self.frequency
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
        return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)

    @torch.no_grad()
    def step(self, words, first, place):
        """Adds one word at a place to each of the slots from first on, and returns the logits."""
        count = len(words)
        x = self.embedding[torch.tensor(words, device="cuda")]
        for number, layer in enumerate(self.layers):
            keys, values = self.cache[number, :, first : first + count]
            normed = torch.nn.functional.rms_norm(x, (WIDTH,), self.norm, 1e-5)
            q, k, v = torch.nn.functional.linear(normed, layer["qkv"]).split(
                (HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD), -1
            )
            keys[:, :, place] = self.rotate(k.view(count, KV_HEADS, HEAD), place)
            values[:, :, place] = v.view(count, KV_HEADS, HEAD)
            q = self.rotate(q.view(count, KV_HEADS, HEADS // KV_HEADS, HEAD), place)
            scores = q @ keys[:, :, : place + 1].transpose(-1, -2) / HEAD**0.5
            mixed = scores.float().softmax(-1).to(x.dtype) @ values[:, :, : place + 1]
            x = x + torch.nn.functional.linear(mixed.reshape(count, WIDTH), layer["out"])
            normed = torch.nn.functional.rms_norm(x, (WIDTH,), self.norm, 1e-5)
            gate = torch.nn.functional.silu(torch.nn.functional.linear(normed, layer["gate"]))
            x = x + torch.nn.functional.linear(
                gate * torch.nn.functional.linear(normed, layer["up"]), layer["down"]
            )
        x = torch.nn.functional.rms_norm(x, (WIDTH,), self.norm, 1e-5)
        return torch.nn.functional.linear(x, self.head)


def sequence_length(gib, slots):
    """Returns how many words each of the slots has in a cache of that size."""
    return (gib << 30) // CACHE_BYTES // slots
