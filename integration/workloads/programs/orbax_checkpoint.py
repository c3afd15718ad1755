# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains with Flax and Optax, while Orbax saves the training every few steps, beside it, in threads.

At the end Orbax loads what it saved last.
"""

import os
import tempfile

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import flax
import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy
import optax
import orbax.checkpoint as ocp

from same_xla import compile_same
from workload import Record, say, short

EVERY = 5


class Network(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x):
        for width in (1024, 1024):
            x = flax.linen.relu(flax.linen.Dense(width)(x))
        return flax.linen.Dense(32)(x)


def train(training, key):
    key, kx, ky = jax.random.split(key, 3)
    x, y = jax.random.normal(kx, (128, 256)), jax.random.normal(ky, (128, 32))

    def loss_of(weights):
        return jnp.mean((training.apply_fn({"params": weights}, x) - y) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(training.params)
    return training.apply_gradients(grads=gradient), key, loss


def digest(tree):
    """Returns a digest of all arrays of a tree."""
    return short(b"".join(numpy.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)))


def main():
    record = Record(__doc__)
    say("JAX", jax.__version__, "Flax", flax.__version__, "Orbax", ocp.__version__, jax.devices())
    if jax.default_backend() != "gpu":
        raise RuntimeError("JAX does not use the GPU")
    network = Network()
    weights = network.init(jax.random.key(1), jnp.zeros((1, 256)))["params"]
    training = flax.training.train_state.TrainState.create(apply_fn=network.apply, params=weights, tx=optax.adamw(1e-3))
    training = training.replace(step=jnp.zeros((), jnp.int32))
    key = jax.random.key(2)
    step = compile_same(jax.jit(train), training, key)

    def flip():
        nonlocal training
        leaves, shape = jax.tree.flatten(training.params)
        largest = max(range(len(leaves)), key=lambda place: leaves[place].nbytes)
        data = numpy.array(leaves[largest])
        data.view(numpy.uint8).reshape(-1)[data.nbytes // 2] ^= 1
        leaves[largest] = jnp.asarray(data)
        training = training.replace(params=jax.tree.unflatten(shape, leaves))

    record.guards(flip)
    directory = tempfile.mkdtemp(prefix="orbax-")
    options = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2)
    with ocp.CheckpointManager(directory, options=options) as manager:
        for number in range(1, record.steps + 1):
            found = digest(training)
            training, key, loss = step(training, key)
            if number % EVERY == 0:
                manager.wait_until_finished()  # else Orbax may pass over this one, as it likes
                if not manager.save(number, args=ocp.args.StandardSave(training)):
                    raise RuntimeError(f"Orbax does not save step {number}")
            record.step(f"{found}-{float(loss).hex()}")
        manager.wait_until_finished()
        last = manager.latest_step()
        empty = jax.tree.map(ocp.utils.to_shape_dtype_struct, training)
        loaded = manager.restore(last, args=ocp.args.StandardRestore(empty))
        say("saved last after step", last)
        record.done(f"{digest(training)}-{last}-{digest(loaded)}".encode())


if __name__ == "__main__":
    main()
