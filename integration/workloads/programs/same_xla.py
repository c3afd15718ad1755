# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Compiles functions with XLA for the same results in each run.

XLA chooses among kernels by a benchmark unless it is asked for the same results in each run. The
options have changed their names over time: the first set that this XLA knows is taken.
"""

from workload import say

OPTIONS = [
    {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0},
    {"xla_gpu_deterministic_ops": True},
    {"xla_gpu_autotune_level": 0},
    {},
]


def compile_same(jitted, *args):
    """Compiles what jax.jit returned, for arguments such as these."""
    lowered = jitted.lower(*args)
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
