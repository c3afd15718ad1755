// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// GPU memory that lives by descriptors. The functions return a CUresult; gk_load comes first.

#ifndef GPUCKPT_MEMORY_H
#define GPUCKPT_MEMORY_H

#include "libcuda.h"

// gk_memory is memory that this process has a handle of.
typedef struct {
	uint64_t handle;
	uint64_t address; // where it is mapped; 0: nowhere
	uint64_t bytes;
	int ordinal; // of its GPU
} gk_memory;

// gk_memory_load binds the driver's functions for the rest. It is CUDA_ERROR_NOT_FOUND if one is missing.
int gk_memory_load(void);
// gk_ordinal finds a GPU. It is CUDA_ERROR_INVALID_VALUE if CUDA shows no such GPU here.
int gk_ordinal(const gk_uuid *uuid, int *ordinal);
// gk_context returns the primary context of a GPU. The driver takes some 0.1 s to make it.
int gk_context(int ordinal, void **context);
// gk_set_current makes a context the calling thread's; the rest needs one.
int gk_set_current(void *context);

// gk_import has memory by its descriptor, which stays the caller's. only is the GPU that it is on where the driver does
// not say; -1: that is an error. gk_create makes m->bytes of memory on the GPU m->ordinal, which can be exported. gk_map
// maps the m->bytes of either.
int gk_import(int fd, gk_memory *m, int only);
int gk_create(gk_memory *m);
int gk_map(gk_memory *m);
// gk_export makes a descriptor, by which the memory lives on.
int gk_export(const gk_memory *m, int *fd);
// gk_let_go ends the mapping and the handle.
void gk_let_go(const gk_memory *m);

// gk_buffer makes pinned host memory, and gk_stream a stream of the current context; both are there until the
// process ends. gk_wait waits for the work of a stream.
int gk_buffer(void **buffer, size_t bytes);
int gk_stream(void **stream);
int gk_wait(void *stream);
// gk_out, gk_in and gk_zero begin to copy out of GPU memory, into it, and to make it zeros.
int gk_out(void *to, uint64_t from, size_t bytes, void *stream);
int gk_in(uint64_t to, const void *from, size_t bytes, void *stream);
int gk_zero(uint64_t to, size_t bytes, void *stream);

// gk_compile compiles PTX text, and returns one of its kernels. gk_digest begins it with so many blocks of threads: see
// ptx.go.
int gk_compile(const char *text, const char *name, void **function);
int gk_digest(void *function, unsigned blocks, unsigned threads, uint64_t memory, void *results, uint32_t first, void *stream);

#endif
