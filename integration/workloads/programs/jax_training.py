# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small network with JAX, by one function that jit compiled."""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy

from same_xla import compile_same
from workload import Record, say, short


def loss_of(weights, x, y):
    hidden = jax.nn.relu(x @ weights["first"])
    return jnp.mean((hidden @ weights["second"] - y) ** 2)


def train(weights, key):
    key, kx, ky = jax.random.split(key, 3)
    x, y = jax.random.normal(kx, (128, 64)), jax.random.normal(ky, (128, 32))
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient), key, loss


def main():
    record = Record(__doc__)
    say("JAX", jax.__version__, jax.devices())
    if jax.default_backend() != "gpu":
        raise RuntimeError("JAX does not use the GPU")
    random = numpy.random.default_rng(1)
    weights = {
        "first": jnp.asarray(random.standard_normal((64, 128)) / 8, dtype=jnp.float32),
        "second": jnp.asarray(random.standard_normal((128, 32)) / 8, dtype=jnp.float32),
    }
    key = jax.random.key(2)
    step = compile_same(jax.jit(train), weights, key)

    def flip():
        first = numpy.array(weights["first"])
        first.view(numpy.uint8).reshape(-1)[first.nbytes // 2] ^= 1
        weights["first"] = jnp.asarray(first)

    record.guards(flip)
    for _ in range(record.steps):
        weights, key, loss = step(weights, key)
        record.step(float(loss).hex())
    record.done(short(b"".join(numpy.asarray(w).tobytes() for w in jax.tree.leaves(weights))).encode())


if __name__ == "__main__":
    main()
