# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a small network with JAX, by one function that jit compiled.

XLA chooses among kernels by a benchmark unless it is asked for the same results in each run. The
options have changed their names over time: the first set that this XLA knows is taken.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy

from workload import Record, say, short

OPTIONS = [
    {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0},
    {"xla_gpu_deterministic_ops": True},
    {"xla_gpu_autotune_level": 0},
    {},
]


def loss_of(weights, x, y):
    hidden = jax.nn.relu(x @ weights["first"])
    return jnp.mean((hidden @ weights["second"] - y) ** 2)


def train(weights, key):
    key, kx, ky = jax.random.split(key, 3)
    x, y = jax.random.normal(kx, (128, 64)), jax.random.normal(ky, (128, 32))
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient), key, loss


def compile_train(*args):
    """Compiles train for the same results in each run."""
    lowered = jax.jit(train).lower(*args)
    for options in OPTIONS:
        try:
            compiled = lowered.compile(compiler_options=options)
        except Exception as err:
            if not options:
                raise
            say("XLA refuses", options, str(err).replace("\n", " ")[:200])
            continue
        say("XLA's options", options)
        return compiled


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
    step = compile_train(weights, key)
    for _ in range(record.steps):
        weights, key, loss = step(weights, key)
        record.step(float(loss).hex())
    record.done(short(b"".join(numpy.asarray(w).tobytes() for w in jax.tree.leaves(weights))).encode())


if __name__ == "__main__":
    main()
