// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Modules: PTX text, of which only the names are read: entries are looked up among the kernels,
// and global variables of one 64-bit word get device memory and their initial value.

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "softcuda.h"

enum { MAX_GLOBALS = 8 };

struct CUmod_st {
	char *text;
	struct {
		char name[64];
		CUdeviceptr address;
	} global[MAX_GLOBALS];
	int globals;
};

static bool is_name(char c)
{
	return isalnum((unsigned char)c) || c == '_' || c == '$';
}

static size_t name_length(const char *s)
{
	size_t n = 0;
	while (is_name(s[n]))
		n++;
	return n;
}

// declared tells whether the text has ".entry NAME".
static bool declared(const char *text, const char *name)
{
	for (const char *at = text; (at = strstr(at, ".entry"));) {
		at += strlen(".entry");
		at += strspn(at, " \t\r\n");
		if (name_length(at) == strlen(name) && !strncmp(at, name, strlen(name)))
			return true;
	}
	return false;
}

// load_globals takes lines of the form ".visible .global .align 8 .u64 NAME [= VALUE];".
static CUresult load_globals(CUmodule m, CUcontext context)
{
	static const char start[] = ".visible .global .align 8 .u64 ";

	for (const char *at = m->text; (at = strstr(at, start));) {
		at += strlen(start);
		size_t len = name_length(at);
		if (!len || len >= sizeof m->global[0].name || m->globals == MAX_GLOBALS)
			return CUDA_ERROR_INVALID_IMAGE;
		uint64_t value = 0;
		const char *rest = at + len + strspn(at + len, " ");
		if (*rest == '=')
			value = strtoull(rest + 1, NULL, 0);
		CUdeviceptr address;
		CUresult r = memory_allocate(context, KIND_DEVICE, sizeof value, &address);
		if (r)
			return r;
		memcpy(m->global[m->globals].name, at, len);
		m->global[m->globals++].address = address;
		memcpy(memory_at(address, sizeof value), &value, sizeof value);
	}
	return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	CUcontext c = context_current();
	if (!c)
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!module || !image)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	const char *text = image;
	if (memchr("\x7f\x50\xba", text[0], 3)) // ELF (cubin) and fatbin images
		return gate_leave(CUDA_ERROR_INVALID_IMAGE);
	if (!strstr(text, ".version") || !strstr(text, ".target"))
		return gate_leave(CUDA_ERROR_INVALID_IMAGE);
	CUmodule m = calloc(1, sizeof *m);
	if (m)
		m->text = strdup(text);
	r = m && m->text ? load_globals(m, c) : CUDA_ERROR_OUT_OF_MEMORY;
	if (!r) {
		*module = m;
		return gate_leave(CUDA_SUCCESS);
	}
	if (m)
		free(m->text);
	free(m);
	return gate_leave(r); // a failed load's globals go with their context
}

CUresult cuModuleUnload(CUmodule module)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!module)
		return gate_leave(CUDA_ERROR_INVALID_HANDLE);
	free(module->text);
	free(module);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!function || !module || !name)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	const struct kernel *k = kernel_named(name, strlen(name));
	if (!k || !declared(module->text, name))
		return gate_leave(CUDA_ERROR_NOT_FOUND);
	*function = (CUfunction)k;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuModuleGetGlobal_v2(CUdeviceptr *address, size_t *bytes, CUmodule module,
                              const char *name)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!module || !name)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	for (int i = 0; i < module->globals; i++) {
		if (strcmp(module->global[i].name, name))
			continue;
		if (address)
			*address = module->global[i].address;
		if (bytes)
			*bytes = sizeof(uint64_t);
		return gate_leave(CUDA_SUCCESS);
	}
	return gate_leave(CUDA_ERROR_NOT_FOUND);
}

// A kernel does the whole grid's work at once.
CUresult cuLaunchKernel(CUfunction function, unsigned int gridX, unsigned int gridY,
                        unsigned int gridZ, unsigned int blockX, unsigned int blockY,
                        unsigned int blockZ, unsigned int sharedBytes, CUstream stream,
                        void **params, void **extra)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	(void)sharedBytes, (void)stream;
	if (!context_current())
		return gate_leave(CUDA_ERROR_INVALID_CONTEXT);
	if (!function || !params || extra || !gridX || !gridY || !gridZ || !blockX || !blockY || !blockZ)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	streams_settle(0);
	int minor = process.gpu[context_current()->ordinal].minor;
	slice_begin(minor);
	r = ((const struct kernel *)function)->run(params, gridX);
	slice_end(minor);
	return gate_leave(r);
}
