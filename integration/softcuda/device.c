// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// cuDevice*: what a program can ask about a GPU.

#include <stdio.h>
#include <string.h>

#include "softcuda.h"

// enter_for also checks the ordinal; on an error the gate has been left.
static CUresult enter_for(CUdevice device, const void *out)
{
	CUresult r = gate_enter();
	if (r)
		return r;
	if (!out)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	if (device < 0 || device >= process.gpus)
		return gate_leave(CUDA_ERROR_INVALID_DEVICE);
	return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count)
{
	CUresult r = enter_for(0, count);
	if (r)
		return r;
	*count = process.gpus;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult r = enter_for(ordinal, device);
	if (r)
		return r;
	*device = ordinal;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetName(char *name, int len, CUdevice device)
{
	CUresult r = enter_for(device, name);
	if (r)
		return r;
	if (len < 1)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	snprintf(name, (size_t)len, "%s", process.gpu[device].name);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	CUresult r = enter_for(device, uuid);
	if (r)
		return r;
	*uuid = process.gpu[device].uuid;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	return cuDeviceGetUuid_v2(uuid, device);
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
	CUresult r = enter_for(device, bytes);
	if (r)
		return r;
	*bytes = process.gpu[device].total;
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetPCIBusId(char *id, int len, CUdevice device)
{
	CUresult r = enter_for(device, id);
	if (r)
		return r;
	if (len < 13)
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	snprintf(id, (size_t)len, "0000:%02X:00.0", process.gpu[device].minor + 1);
	return gate_leave(CUDA_SUCCESS);
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
	struct config config;
	CUresult r = enter_for(device, value);
	if (r)
		return r;
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
	case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
		*value = 1;
		break;
	case CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS:
		config_load(&config);
		*value = !config.no_words;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		*value = process.gpu[device].minor + 1;
		break;
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		*value = 0;
		break;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		*value = 9;
		break;
	default:
		return gate_leave(CUDA_ERROR_INVALID_VALUE);
	}
	return gate_leave(CUDA_SUCCESS);
}
