# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains a network with JAX over two GPUs of one process, each with half of the batch.

XLA lets each GPU reach the other's memory, and adds the gradients up by NCCL. It takes its memory
at the start, as JAX does by default, though less of it.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.05")
os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # the tests name one GPU
# As nccl_setup.py has it, and no host memory of cuMemCreate, which no way brings back (docs/limits.md).
os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_CUMEM_HOST_ENABLE="0")

import jax
import jax.numpy as jnp
import numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from same_xla import compile_same
from workload import Record, say, short, skip


def loss_of(weights, x, y):
    hidden = jax.nn.relu(x @ weights["first"])
    return jnp.mean((hidden @ weights["second"] - y) ** 2)


def train(weights, x, y):
    loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradient), loss


def main():
    record = Record(__doc__)
    say("JAX", jax.__version__, jax.devices())
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        skip("JAX has less than two GPUs")
    mesh = Mesh(jax.devices()[:2], ("batch",))
    halves, whole = NamedSharding(mesh, PartitionSpec("batch")), NamedSharding(mesh, PartitionSpec())
    random = numpy.random.default_rng(1)

    def numbers(*shape):
        return random.standard_normal(shape).astype(numpy.float32) / 8

    weights = jax.device_put({"first": numbers(512, 1024), "second": numbers(1024, 256)}, whole)
    batch = jax.device_put((numbers(256, 512), numbers(256, 256)), halves)
    step = compile_same(jax.jit(train), weights, *batch)

    def flip():
        first = numpy.array(weights["first"])
        first.view(numpy.uint8).reshape(-1)[first.nbytes // 2] ^= 1
        weights["first"] = jax.device_put(first, whole)

    record.guards(flip)
    for _ in range(record.steps):
        weights, loss = step(weights, *batch)
        record.step(float(loss).hex())
    record.done(short(b"".join(numpy.asarray(w).tobytes() for w in jax.tree.leaves(weights))).encode())


if __name__ == "__main__":
    main()
