# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a model file (GGUF, version 3) of a Llama with made-up weights, in float16.

Its greedy words are known: after word n comes word n+1, by a margin that no order of sums changes. How likely it
finds that word depends on all words before and on each layer, so it tells whose cache answered.
"""

import argparse
import array
import math
import random
import struct

POOL = 1 << 20  # weights, repeated from other places


def text(s):
    data = s.encode()
    return struct.pack("<Q", len(data)) + data


def key(name, kind, value):
    """One of the file's values: uint32 (4), float32 (6), string (8), or an array (9) of such."""
    if isinstance(value, list):
        one = text if kind == 8 else lambda v: struct.pack("<i" if kind == 5 else "<f", v)
        return text(name) + struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(one, value))
    return text(name) + struct.pack("<I", kind) + (text(value) if kind == 8 else struct.pack("<I" if kind == 4 else "<f", value))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("file")
    p.add_argument("--layers", type=int, default=32)
    p.add_argument("--width", type=int, default=4096)
    p.add_argument("--inner", type=int, default=14336)
    p.add_argument("--heads", type=int, default=32)
    p.add_argument("--kv-heads", type=int, default=8)
    p.add_argument("--words", type=int, default=32768)
    a = p.parse_args()
    head = a.width // a.heads
    made = random.Random(1)
    uniform = [made.uniform(-1, 1) * math.sqrt(3) for _ in range(POOL)]
    pools = {}

    def weights(scale, at, count):
        """count weights of that standard deviation, which follow from where they begin."""
        if scale not in pools:
            pools[scale] = memoryview(2 * struct.pack(f"<{POOL}e", *(scale * v for v in uniform)))
        begin = 2 * (at % POOL)
        return pools[scale][begin : begin + 2 * count]

    def matrix(inputs, outputs, scale):
        def write(f):
            for left in range(inputs * outputs, 0, -POOL):
                f.write(weights(scale, made.randrange(POOL), min(left, POOL)))

        return [inputs, outputs], 1, write

    def words(scale, shift):
        """A row for each word: that of word n is the embedding of word n - shift."""

        def write(f):
            for n in range(a.words):
                f.write(weights(scale, 7919 * (n - shift), a.width))

        return [a.width, a.words], 1, write

    ones = [a.width], 0, lambda f: f.write(array.array("f", [1.0] * a.width).tobytes())
    mix, add = 1 / math.sqrt(a.width), 1 / math.sqrt(a.layers)
    tensors = {
        "token_embd.weight": words(1.0, 0),
        "output_norm.weight": ones,
        "output.weight": words((math.log(a.words) + 2) / a.width, 1),
    }
    for i in range(a.layers):
        tensors |= {
            f"blk.{i}.attn_norm.weight": ones,
            f"blk.{i}.attn_q.weight": matrix(a.width, a.heads * head, mix),
            f"blk.{i}.attn_k.weight": matrix(a.width, a.kv_heads * head, mix),
            f"blk.{i}.attn_v.weight": matrix(a.width, a.kv_heads * head, mix),
            f"blk.{i}.attn_output.weight": matrix(a.heads * head, a.width, mix * add),
            f"blk.{i}.ffn_norm.weight": ones,
            f"blk.{i}.ffn_gate.weight": matrix(a.width, a.inner, mix),
            f"blk.{i}.ffn_up.weight": matrix(a.width, a.inner, mix),
            f"blk.{i}.ffn_down.weight": matrix(a.inner, a.width, add / math.sqrt(a.inner)),
        }
    spelled = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    kinds = [2, 3, 3] + [6] * 256  # unknown, control, byte
    spelled += [f"\u2581{n}" for n in range(len(spelled), a.words)]
    kinds += [1] * (a.words - len(kinds))
    keys = [
        key("general.architecture", 8, "llama"),
        key("llama.block_count", 4, a.layers),
        key("llama.context_length", 4, 8192),
        key("llama.embedding_length", 4, a.width),
        key("llama.feed_forward_length", 4, a.inner),
        key("llama.attention.head_count", 4, a.heads),
        key("llama.attention.head_count_kv", 4, a.kv_heads),
        key("llama.attention.layer_norm_rms_epsilon", 6, 1e-5),
        key("llama.rope.dimension_count", 4, head),
        key("llama.rope.freq_base", 6, 500000.0),
        key("llama.vocab_size", 4, a.words),
        key("tokenizer.ggml.model", 8, "llama"),
        key("tokenizer.ggml.tokens", 8, spelled),
        key("tokenizer.ggml.scores", 6, [-float(n) for n in range(a.words)]),
        key("tokenizer.ggml.token_type", 5, kinds),
        key("tokenizer.ggml.bos_token_id", 4, 1),
        key("tokenizer.ggml.eos_token_id", 4, 2),
    ]
    with open(a.file, "wb") as f:
        f.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join(keys))
        offset = 0
        for name, (shape, kind, _) in tensors.items():
            f.write(text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset))
            offset += -(-math.prod(shape) * (4, 2)[kind] // 32) * 32
        for _, _, write in tensors.values():
            f.write(bytes(-f.tell() % 32))
            write(f)


if __name__ == "__main__":
    main()
