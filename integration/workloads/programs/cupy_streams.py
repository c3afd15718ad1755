# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""CuPy: four streams with events, a kernel of its own, FFTs, random numbers, a pool of pinned memory."""

import cupy
import cupyx
import numpy

from workload import Record, say, short

SOURCE = r"""
extern "C" __global__ void mix(long long *x, long long k, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n)
		x[i] = (x[i] * 1103515245LL + k + i) % 2147483647LL;
}
"""


def main():
    record = Record(__doc__)
    say("CuPy", cupy.__version__)
    pool = cupy.cuda.PinnedMemoryPool()
    cupy.cuda.set_pinned_memory_allocator(pool.malloc)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    mix = cupy.RawKernel(SOURCE, "mix")
    size = 1 << 16
    numbers = [cupy.arange(size, dtype=cupy.int64) + part for part in range(len(streams))]
    random = cupy.random.RandomState(7)
    signal = random.standard_normal(size).astype(cupy.complex64)
    turn = cupy.exp(1j * cupy.arange(size) * 0.01).astype(cupy.complex64)
    host = cupyx.empty_pinned((len(streams), size), dtype=numpy.int64)
    cupy.cuda.Device().synchronize()

    def flip():
        numbers[2].view(cupy.uint8)[numbers[2].nbytes // 2] ^= 1

    record.guards(flip)
    for number in range(record.steps):
        for part, stream in enumerate(streams):
            with stream:
                mix((size // 256,), (256,), (numbers[part], numpy.int64(number), numpy.int32(size)))
                numbers[part].get(stream=stream, out=host[part], blocking=False)
            cupy.cuda.Stream.null.wait_event(stream.record())
        signal = cupy.fft.ifft(cupy.fft.fft(signal) * turn).astype(cupy.complex64)
        signal += random.standard_normal(size).astype(cupy.complex64) * 1e-3
        cupy.cuda.Device().synchronize()
        record.step(short(host.tobytes() + signal.get().tobytes()))
    record.done()


if __name__ == "__main__":
    main()
