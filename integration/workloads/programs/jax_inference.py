# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes greedily with JAX: a small transformer with a KV cache that each step takes over.

JAX takes a share of the GPU's memory when it begins, as it does by default, but a smaller one.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.03")

import jax
import jax.numpy as jnp
import numpy

from same_xla import compile_same
from workload import Record, say, short

LAYERS, WIDTH, HEADS, LENGTH, WORDS = 4, 256, 4, 512, 1024
HEAD = WIDTH // HEADS


def step(cache, weights, word, place):
    x = weights["embedding"][word]
    seen = jnp.arange(LENGTH) <= place
    for layer in range(LAYERS):
        w = weights["layers"][layer]
        at = [jnp.asarray(n, jnp.int32) for n in (layer, 0, 0, place, 0)]
        q, k, v = (x @ w["qkv"]).reshape(3, HEADS, HEAD)
        cache = jax.lax.dynamic_update_slice(cache, jnp.stack((k, v))[None, :, :, None], at)
        keys, values = cache[layer]
        scores = jnp.einsum("hd,hld->hl", q, keys) / HEAD**0.5
        mixed = jnp.einsum("hl,hld->hd", jax.nn.softmax(jnp.where(seen, scores, -1e30)), values)
        x = x + mixed.reshape(WIDTH) @ w["out"]
        x = x + jax.nn.gelu(x @ w["up"]) @ w["down"]
        x = x / jnp.sqrt(jnp.mean(x * x) + 1e-5)
    logits = x @ weights["embedding"].T
    return cache, jnp.argmax(logits), logits


def main():
    record = Record(__doc__)
    say("JAX", jax.__version__, jax.devices())
    if jax.default_backend() != "gpu":
        raise RuntimeError("JAX does not use the GPU")
    random = numpy.random.default_rng(1)

    def weight(*shape):
        return jnp.asarray(random.standard_normal(shape) / shape[0] ** 0.5, dtype=jnp.float32)

    weights = {
        "embedding": weight(WORDS, WIDTH),
        "layers": [
            {"qkv": weight(WIDTH, 3 * WIDTH), "out": weight(WIDTH, WIDTH), "up": weight(WIDTH, 4 * WIDTH), "down": weight(4 * WIDTH, WIDTH)}
            for _ in range(LAYERS)
        ],
    }
    cache = jnp.zeros((LAYERS, 2, HEADS, LENGTH, HEAD), jnp.float32)
    word = jnp.asarray(7, jnp.int32)
    run = compile_same(jax.jit(step, donate_argnums=0), cache, weights, word, jnp.asarray(0, jnp.int32))

    def flip():
        up = numpy.array(weights["layers"][2]["up"])
        up.view(numpy.uint8).reshape(-1)[up.nbytes // 2] ^= 1
        weights["layers"][2]["up"] = jnp.asarray(up)

    record.guards(flip)
    for place in range(record.steps):
        cache, word, logits = run(cache, weights, word, jnp.asarray(place % LENGTH, jnp.int32))
        word = word.astype(jnp.int32)
        record.step(f"{int(word)}-{short(numpy.asarray(logits).tobytes())}")
    left = [numpy.asarray(leaf).tobytes() for leaf in (cache, *jax.tree.leaves(weights))]
    record.done(short(b"".join(left)).encode())


if __name__ == "__main__":
    main()
