# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes with CUDA, and draws with EGL on the same GPU."""

import ctypes as C
import os

from workload import Record, deterministic_torch, flip_bit, short, skip, tensor_bytes

VENDORS = ("/usr/local/nvidia/share", "/usr/share")


def draw():
    """Has NVIDIA's EGL clear a surface of 64 by 64 pixels. The numbers are those of EGL/egl.h and EGL/eglext.h."""
    files = [f"{folder}/glvnd/egl_vendor.d/10_nvidia.json" for folder in VENDORS]
    os.environ["__EGL_VENDOR_LIBRARY_FILENAMES"] = vendor = ":".join(filter(os.path.exists, files))
    if not vendor:
        skip("NVIDIA's EGL is not installed")
    try:
        get = C.CDLL("libEGL.so.1").eglGetProcAddress
    except OSError as missing:
        skip(missing)
    get.restype, get.argtypes = C.c_void_p, [C.c_char_p]
    integer, pointer, nothing = C.c_int, C.c_void_p, None

    def call(name, result, *types):
        return C.CFUNCTYPE(result, *types)(get(name.encode()))

    devices, config, count = (pointer * 16)(), pointer(), integer()
    call("eglQueryDevicesEXT", integer, integer, pointer, pointer)(16, devices, C.byref(count))
    displays = [
        call("eglGetPlatformDisplayEXT", pointer, integer, pointer, pointer)(0x313F, device, None)
        for device in devices[: count.value]
    ]
    display = next(d for d in displays if call("eglInitialize", integer, pointer, pointer, pointer)(d, None, None))
    call("eglBindAPI", integer, integer)(0x30A2)
    call("eglChooseConfig", integer, pointer, pointer, pointer, integer, pointer)(
        display, (integer * 3)(0x3033, 1, 0x3038), C.byref(config), 1, C.byref(count)
    )
    surface = call("eglCreatePbufferSurface", pointer, pointer, pointer, pointer)(
        display, config, (integer * 5)(0x3057, 64, 0x3056, 64, 0x3038)
    )
    context = call("eglCreateContext", pointer, pointer, pointer, pointer, pointer)(display, config, None, None)
    if not call("eglMakeCurrent", integer, pointer, pointer, pointer, pointer)(display, surface, surface, context):
        raise RuntimeError("EGL made no context")
    call("glClear", nothing, C.c_uint)(0x4000)
    call("glFinish", nothing)()


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    data = torch.Generator(device="cuda").manual_seed(2)
    total = torch.zeros(256, 256, device="cuda")
    record.guards(lambda: flip_bit(total))
    draw()
    for _ in range(record.steps):
        total += torch.randn(256, 256, generator=data, device="cuda")
        record.step(short(tensor_bytes([total])))
    record.done(short(tensor_bytes([total])).encode())


if __name__ == "__main__":
    main()
