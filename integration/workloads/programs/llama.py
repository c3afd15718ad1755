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
    """Keeps some sequences, each in a slot of the cache.

    With several parts, as a rank of tensor parallelism has, it is one of them: its share of the heads
    and of the inner layer, by columns and then by rows, and of the words of the last layer. The
    embedding is whole.
    """

    def __init__(self, slots, length, seed=1, parts=1):
        random = torch.Generator(device="cuda").manual_seed(seed)

        def weight(*shape):
            return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02, generator=random)

        self.heads, self.kv_heads, inner = HEADS // parts, KV_HEADS // parts, INNER // parts
        self.embedding = weight(WORDS, WIDTH)
        self.layers = [
            {
                "qkv": weight((self.heads + 2 * self.kv_heads) * HEAD, WIDTH),
                "out": weight(WIDTH, self.heads * HEAD),
                "gate": weight(inner, WIDTH),
                "up": weight(inner, WIDTH),
                "down": weight(WIDTH, inner),
            }
            for _ in range(LAYERS)
        ]
        self.head = weight(WORDS // parts, WIDTH)
        self.norm = torch.ones(WIDTH, dtype=torch.bfloat16, device="cuda")
        self.slots, self.length = slots, length
        self.cache = torch.zeros(
            LAYERS, 2, slots, self.kv_heads, length, HEAD, dtype=torch.bfloat16, device="cuda"
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

    def logits(self, x, attend, whole=lambda part: part):
        """Takes embedded words through all layers, and returns the logits.

        attend is the attention of a layer, by its number and its queries, keys and values. whole makes
        the sum over all parts of one.
        """
        for number, layer in enumerate(self.layers):
            normed = torch.nn.functional.rms_norm(x, (WIDTH,), self.norm, 1e-5)
            q, k, v = torch.nn.functional.linear(normed, layer["qkv"]).split(
                (self.heads * HEAD, self.kv_heads * HEAD, self.kv_heads * HEAD), -1
            )
            x = x + whole(torch.nn.functional.linear(attend(number, q, k, v), layer["out"]))
            normed = torch.nn.functional.rms_norm(x, (WIDTH,), self.norm, 1e-5)
            gate = torch.nn.functional.silu(torch.nn.functional.linear(normed, layer["gate"]))
            x = x + whole(
                torch.nn.functional.linear(gate * torch.nn.functional.linear(normed, layer["up"]), layer["down"])
            )
        x = torch.nn.functional.rms_norm(x, (WIDTH,), self.norm, 1e-5)
        return torch.nn.functional.linear(x, self.head)

    @torch.no_grad()
    def step(self, words, first, place):
        """Adds one word at a place to each of the slots from first on, and returns the logits."""
        count = len(words)

        def attend(number, q, k, v):
            keys, values = self.cache[number, :, first : first + count]
            keys[:, :, place] = self.rotate(k.view(count, self.kv_heads, HEAD), place)
            values[:, :, place] = v.view(count, self.kv_heads, HEAD)
            q = self.rotate(q.view(count, self.kv_heads, HEADS // KV_HEADS, HEAD), place)
            scores = q @ keys[:, :, : place + 1].transpose(-1, -2) / HEAD**0.5
            mixed = scores.float().softmax(-1).to(q.dtype) @ values[:, :, : place + 1]
            return mixed.reshape(count, self.heads * HEAD)

        return self.logits(self.embedding[torch.tensor(words, device="cuda")], attend)


def sequence_length(gib, slots):
    """Returns how many words each of the slots has in a cache of that size."""
    return (gib << 30) // CACHE_BYTES // slots
