# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Numba: kernels out of Python, shared memory, atomics, pinned and mapped host memory, a late one."""

import numpy

# NumPy 2.5 has it no more, and Numba 0.68 looks for it while it loads.
if not hasattr(numpy, "row_stack"):
    numpy.row_stack = numpy.vstack

from numba import cuda, int64

from workload import Record, say, short, skip


@cuda.jit
def mix(x, k):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = (x[i] * 1103515245 + k + i) % 2147483647


@cuda.jit
def add_up(x, total):
    part = cuda.shared.array(256, int64)
    i, here = cuda.grid(1), cuda.threadIdx.x
    part[here] = x[i] if i < x.size else 0
    cuda.syncthreads()
    if here == 0:
        s = int64(0)
        for k in range(256):
            s += part[k]
        cuda.atomic.add(total, 0, s)


@cuda.jit
def mix_late(x):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = (x[i] * 48271 + 11) % 2147483647


def main():
    record = Record(__doc__)
    import numba

    say("Numba", numba.__version__)
    size = 1 << 16
    stream = cuda.stream()
    x = cuda.to_device(numpy.arange(size, dtype=numpy.int64), stream=stream)
    total = cuda.to_device(numpy.zeros(1, dtype=numpy.int64), stream=stream)
    pinned = cuda.pinned_array(size, dtype=numpy.int64)
    mapped = cuda.mapped_array(256, dtype=numpy.int64)
    mapped[:] = numpy.arange(256)

    def flip():
        data = x.copy_to_host(stream=stream)
        stream.synchronize()
        data.view(numpy.uint8)[data.nbytes // 2] ^= 1
        x.copy_to_device(data, stream=stream)
        stream.synchronize()

    try:
        mix[size // 256, 256, stream](x, 0)
    except (AttributeError, ImportError) as err:
        skip(f"Numba {numba.__version__} does not go with NumPy {numpy.__version__}:", err)
    record.guards(flip)
    for number in range(record.steps):
        mix[size // 256, 256, stream](x, number)
        if number >= record.steps * 3 // 4:
            mix_late[size // 256, 256, stream](x)
        add_up[size // 256, 256, stream](x, total)
        mix[1, 256, stream](mapped, number)
        x.copy_to_host(pinned, stream=stream)
        stream.synchronize()
        record.step(f"{int(total.copy_to_host()[0]):x}-{short(pinned.tobytes() + mapped.tobytes())}")
    record.done()


if __name__ == "__main__":
    main()
