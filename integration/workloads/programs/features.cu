/* Copyright The gpuckpt Authors. */
/* SPDX-License-Identifier: Apache-2.0 */

/*
 * What CUDA C has beside plain memory, each part with a state of its own that each step changes:
 * streams and events, textures and surfaces, the device's heap, cooperative launches, virtual
 * memory management, mapped and registered host memory, pools of asynchronous memory, graphs with
 * host nodes, variables and constants of a module.
 *
 * The value of a step has a number for each part, so that a difference says which part was lost.
 */

#include <cooperative_groups.h>
#include <cuda.h>
#include <dlfcn.h>

#include "kernels.cuh"

static word *sum; /* on the GPU */

/* Returns the sum of words on the GPU, after all work in a stream. */
static word folded(const word *x, size_t n, cudaStream_t stream)
{
	word result;

	CHECK(cudaMemsetAsync(sum, 0, sizeof *sum, stream));
	fold<<<64, 256, 0, stream>>>(x, n, sum);
	CHECK(cudaGetLastError());
	CHECK(cudaMemcpyAsync(&result, sum, sizeof result, cudaMemcpyDeviceToHost, stream));
	CHECK(cudaStreamSynchronize(stream));
	return result;
}

enum { WORDS = 1 << 20 };

/* Streams that wait for each other by events. */

static cudaStream_t streams[4];
static cudaEvent_t events[4];
static word *chained;

static void begin_streams(void)
{
	int low, high;

	CHECK(cudaDeviceGetStreamPriorityRange(&low, &high));
	for (int i = 0; i < 4; i++) {
		CHECK(cudaStreamCreateWithPriority(&streams[i], cudaStreamNonBlocking, i % 2 ? low : high));
		CHECK(cudaEventCreateWithFlags(&events[i], i % 2 ? cudaEventDisableTiming : cudaEventDefault));
	}
	CHECK(cudaMalloc(&chained, WORDS * sizeof(word)));
	CHECK(cudaMemset(chained, 1, WORDS * sizeof(word)));
	CHECK(cudaDeviceSynchronize());
}

static word step_streams(word k)
{
	for (int i = 0; i < 4; i++) {
		CHECK(cudaStreamWaitEvent(streams[i], events[(i + 3) % 4]));
		mix<<<64, 256, 0, streams[i]>>>(chained, WORDS, k + i);
		CHECK(cudaGetLastError());
		CHECK(cudaEventRecord(events[i], streams[i]));
	}
	CHECK(cudaEventSynchronize(events[3]));
	return folded(chained, WORDS, streams[3]);
}

/* An array that a surface writes and a texture reads, with interpolation. */

enum { SIDE = 256 };
static cudaArray_t array;
static cudaTextureObject_t texture_object;
static cudaSurfaceObject_t surface_object;
static word *samples;

__global__ void draw(cudaSurfaceObject_t to, int k)
{
	int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
	float old = surf2Dread<float>(to, x * sizeof(float), y);

	surf2Dwrite(old * 0.5f + (float)((x * 31 + y * 17 + k) % 1009), to, x * sizeof(float), y);
}

__global__ void look(cudaTextureObject_t from, word *to)
{
	int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;

	to[y * SIDE + x] = __float_as_uint(tex2D<float>(from, (x + 0.3f) / SIDE, (y + 0.7f) / SIDE));
}

static void begin_texture(void)
{
	cudaChannelFormatDesc format = cudaCreateChannelDesc<float>();
	cudaResourceDesc resource = {};
	cudaTextureDesc how = {};

	CHECK(cudaMallocArray(&array, &format, SIDE, SIDE, cudaArraySurfaceLoadStore));
	resource.resType = cudaResourceTypeArray;
	resource.res.array.array = array;
	how.addressMode[0] = how.addressMode[1] = cudaAddressModeWrap;
	how.filterMode = cudaFilterModeLinear;
	how.readMode = cudaReadModeElementType;
	how.normalizedCoords = 1;
	CHECK(cudaCreateTextureObject(&texture_object, &resource, &how, NULL));
	CHECK(cudaCreateSurfaceObject(&surface_object, &resource));
	CHECK(cudaMalloc(&samples, SIDE * SIDE * sizeof(word)));
	float *zeros = (float *)calloc(SIDE * SIDE, sizeof(float));
	CHECK(cudaMemcpy2DToArray(array, 0, 0, zeros, SIDE * sizeof(float), SIDE * sizeof(float), SIDE, cudaMemcpyHostToDevice));
	free(zeros);
}

static word step_texture(word k)
{
	dim3 blocks(SIDE / 16, SIDE / 16), threads(16, 16);

	draw<<<blocks, threads>>>(surface_object, (int)k);
	CHECK(cudaGetLastError());
	look<<<blocks, threads>>>(texture_object, samples);
	CHECK(cudaGetLastError());
	return folded(samples, SIDE * SIDE, 0);
}

/* A list on the device's heap that a kernel makes longer. */

struct node {
	struct node *next;
	word value;
};
__device__ struct node *list;
__device__ word list_sum;

__global__ void lengthen(word k)
{
	struct node *n = (struct node *)malloc(sizeof *n);
	word s = 0;

	if (n) {
		n->next = list;
		n->value = k * 2654435761u + 1;
		list = n;
	}
	for (struct node *at = list; at; at = at->next) {
		at->value = at->value * 6364136223846793005ull + k;
		s = s * 31 + at->value;
	}
	list_sum = s;
}

static void begin_heap(void)
{
	/* The limit was set before the first kernel. */
}

static word step_heap(word k)
{
	word result;

	lengthen<<<1, 1>>>(k);
	CHECK(cudaGetLastError());
	CHECK(cudaMemcpyFromSymbol(&result, list_sum, sizeof result));
	return result;
}

/* A kernel whose blocks wait for each other. */

static word *shared_words;

__global__ void together(word *x, size_t n, word k)
{
	cooperative_groups::grid_group grid = cooperative_groups::this_grid();

	for (int round = 0; round < 3; round++) {
		size_t other = n / 3 * (round + 1);
		word mine[8];
		int count = 0;
		for (size_t i = grid.thread_rank(); i < n; i += grid.size())
			mine[count++] = x[(i + other) % n] + k;
		grid.sync();
		count = 0;
		for (size_t i = grid.thread_rank(); i < n; i += grid.size())
			x[i] = x[i] * 6364136223846793005ull + mine[count++];
		grid.sync();
	}
}

static void begin_cooperative(void)
{
	CHECK(cudaMalloc(&shared_words, (WORDS >> 4) * sizeof(word)));
	CHECK(cudaMemset(shared_words, 3, (WORDS >> 4) * sizeof(word)));
}

static word step_cooperative(word k)
{
	size_t n = WORDS >> 4; /* 4 for each thread */
	void *arguments[] = {&shared_words, &n, &k};

	CHECK(cudaLaunchCooperativeKernel((void *)together, dim3(64), dim3(256), arguments, 0, 0));
	return folded(shared_words, n, 0);
}

/* Virtual memory management: physical memory in reserved addresses, more of it at times. */

static CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
static CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
static CUresult (*map)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
static CUresult (*allow)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
static CUresult (*granularity)(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
static CUdeviceptr addresses;
static size_t chunk;
static int chunks;

#define DRIVER(call)                                                                                 \
	do {                                                                                         \
		CUresult error_ = (call);                                                            \
		if (error_ != CUDA_SUCCESS) {                                                        \
			fprintf(stderr, "%s:%d: %s: error %d\n", __FILE__, __LINE__, #call, error_); \
			exit(1);                                                                     \
		}                                                                                    \
	} while (0)

static void *find(const char *name)
{
	static void *library;

	if (!library)
		library = dlopen("libcuda.so.1", RTLD_NOW);
	void *found = library ? dlsym(library, name) : NULL;
	if (!found) {
		fprintf(stderr, "libcuda.so.1 has no %s\n", name);
		exit(1);
	}
	return found;
}

static void add_chunk(void)
{
	CUmemAllocationProp property = {};
	CUmemAccessDesc access = {};
	CUmemGenericAllocationHandle handle;

	property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	access.location = property.location;
	access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
	DRIVER(create(&handle, chunk, &property, 0));
	DRIVER(map(addresses + chunks * chunk, chunk, 0, handle, 0));
	DRIVER(allow(addresses + chunks * chunk, chunk, &access, 1));
	CHECK(cudaMemset((void *)(addresses + chunks * chunk), 5 + chunks, chunk));
	chunks++;
}

static void begin_vmm(void)
{
	CUmemAllocationProp property = {};

	*(void **)&reserve = find("cuMemAddressReserve");
	*(void **)&create = find("cuMemCreate");
	*(void **)&map = find("cuMemMap");
	*(void **)&allow = find("cuMemSetAccess");
	*(void **)&granularity = find("cuMemGetAllocationGranularity");
	property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
	property.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
	DRIVER(granularity(&chunk, &property, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
	DRIVER(reserve(&addresses, 64 * chunk, 0, 0, 0));
	add_chunk();
}

static word step_vmm(word k)
{
	if (k % 20 == 10 && chunks < 64)
		add_chunk();
	mix<<<64, 256>>>((word *)addresses, chunks * chunk / sizeof(word), k);
	CHECK(cudaGetLastError());
	return folded((word *)addresses, chunks * chunk / sizeof(word), 0);
}

/* Host memory that the GPU reads and writes: allocated by CUDA, and registered later. */

static word *mapped, *registered;

static word step_host(word *host, word k)
{
	word *device, s = 0;

	for (size_t i = k % 64; i < WORDS >> 4; i += 64)
		host[i] += k;
	CHECK(cudaHostGetDevicePointer((void **)&device, host, 0));
	mix<<<64, 256>>>(device, WORDS >> 4, k);
	CHECK(cudaGetLastError());
	CHECK(cudaDeviceSynchronize());
	for (size_t i = 0; i < WORDS >> 4; i++)
		s += host[i] * (2 * i + 1);
	return s ^ folded(device, WORDS >> 4, 0) << 1;
}

static void begin_mapped(void)
{
	CHECK(cudaHostAlloc((void **)&mapped, (WORDS >> 4) * sizeof(word), cudaHostAllocMapped | cudaHostAllocPortable));
	memset(mapped, 7, (WORDS >> 4) * sizeof(word));
}

static word step_mapped(word k)
{
	return step_host(mapped, k);
}

static void begin_registered(void)
{
	if (posix_memalign((void **)&registered, 4096, (WORDS >> 4) * sizeof(word)))
		exit(1);
	memset(registered, 9, (WORDS >> 4) * sizeof(word));
	CHECK(cudaHostRegister(registered, (WORDS >> 4) * sizeof(word), cudaHostRegisterMapped));
}

static word step_registered(word k)
{
	return step_host(registered, k);
}

/* Memory of a pool, in the order of a stream. */

static cudaStream_t pooled_stream;
static word *pooled;
static size_t pooled_words;

static void begin_pool(void)
{
	cudaMemPool_t pool;
	uint64_t keep = UINT64_MAX;

	CHECK(cudaStreamCreate(&pooled_stream));
	CHECK(cudaDeviceGetDefaultMemPool(&pool, 0));
	CHECK(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep));
	pooled_words = 4096;
	CHECK(cudaMallocAsync((void **)&pooled, pooled_words * sizeof(word), pooled_stream));
	CHECK(cudaMemsetAsync(pooled, 2, pooled_words * sizeof(word), pooled_stream));
}

static word step_pool(word k)
{
	size_t size = 4096 + k * 7919 % 65536;
	word *next;

	CHECK(cudaMallocAsync((void **)&next, size * sizeof(word), pooled_stream));
	CHECK(cudaMemsetAsync(next, (int)(k % 251), size * sizeof(word), pooled_stream));
	CHECK(cudaMemcpyAsync(next, pooled, (size < pooled_words ? size : pooled_words) * sizeof(word), cudaMemcpyDeviceToDevice, pooled_stream));
	mix<<<16, 256, 0, pooled_stream>>>(next, size, k);
	CHECK(cudaGetLastError());
	CHECK(cudaFreeAsync(pooled, pooled_stream));
	pooled = next;
	pooled_words = size;
	return folded(pooled, pooled_words, pooled_stream);
}

/* A graph with a copy, a kernel and a function of the host's. */

static cudaStream_t graph_stream;
static cudaGraphExec_t graph;
static word *on_device, *on_host, counted;

static void CUDART_CB count(void *data)
{
	counted = counted * 6364136223846793005ull + *(word *)data;
}

static void begin_graph(void)
{
	cudaGraph_t made;

	CHECK(cudaStreamCreate(&graph_stream));
	CHECK(cudaMalloc(&on_device, WORDS * sizeof(word)));
	CHECK(cudaMemset(on_device, 4, WORDS * sizeof(word)));
	CHECK(cudaMallocHost((void **)&on_host, WORDS * sizeof(word)));
	CHECK(cudaDeviceSynchronize());
	CHECK(cudaStreamBeginCapture(graph_stream, cudaStreamCaptureModeGlobal));
	mix<<<64, 256, 0, graph_stream>>>(on_device, WORDS, 13);
	CHECK(cudaMemcpyAsync(on_host, on_device, WORDS * sizeof(word), cudaMemcpyDeviceToHost, graph_stream));
	CHECK(cudaLaunchHostFunc(graph_stream, count, on_host + 4711));
	CHECK(cudaStreamEndCapture(graph_stream, &made));
	CHECK(cudaGraphInstantiate(&graph, made, 0));
	CHECK(cudaGraphDestroy(made));
}

static word step_graph(word)
{
	word s = 0;

	CHECK(cudaGraphLaunch(graph, graph_stream));
	CHECK(cudaStreamSynchronize(graph_stream));
	for (size_t i = 0; i < WORDS; i++)
		s += on_host[i] * (2 * i + 1);
	return s ^ counted << 1;
}

/* Variables and constants of the module. */

__device__ word variable[1024];
__constant__ word constant[16];

__global__ void use_constant(void)
{
	for (int i = threadIdx.x; i < 1024; i += blockDim.x)
		variable[i] = variable[i] * 6364136223846793005ull + constant[i % 16] + i;
}

static void begin_module(void)
{
	word values[16];

	for (int i = 0; i < 16; i++)
		values[i] = i * 2654435761u + 3;
	CHECK(cudaMemcpyToSymbol(constant, values, sizeof values));
}

static word step_module(word)
{
	word *at;

	use_constant<<<1, 256>>>();
	CHECK(cudaGetLastError());
	CHECK(cudaGetSymbolAddress((void **)&at, variable));
	return folded(at, 1024, 0);
}

static const struct part {
	const char *name;
	void (*begin)(void);
	word (*step)(word);
} parts[] = {
	{"streams", begin_streams, step_streams},
	{"texture", begin_texture, step_texture},
	{"heap", begin_heap, step_heap},
	{"cooperative", begin_cooperative, step_cooperative},
	{"vmm", begin_vmm, step_vmm},
	{"mapped", begin_mapped, step_mapped},
	{"registered", begin_registered, step_registered},
	{"pool", begin_pool, step_pool},
	{"graph", begin_graph, step_graph},
	{"module", begin_module, step_module},
};

static int wanted(const struct record *r, const char *name)
{
	char with_comma[32];

	snprintf(with_comma, sizeof with_comma, "%s,", name);
	return !r->parts || strstr(r->parts, with_comma);
}

int main(int argc, char **argv)
{
	struct record r = begin(argc, argv);

	CHECK(cudaDeviceSetLimit(cudaLimitMallocHeapSize, 16 << 20));
	CHECK(cudaMalloc(&sum, sizeof *sum));
	printf("# parts:");
	for (const struct part &p : parts)
		if (wanted(&r, p.name)) {
			p.begin();
			printf(" %s", p.name);
		}
	printf("\n");
	CHECK(cudaDeviceSynchronize());
	while (r.number < r.steps) {
		char value[1024] = "";
		if (flips(&r) && registered) {
			flip_bit<<<1, 1>>>(registered + 777);
			CHECK(cudaDeviceSynchronize());
		}
		for (const struct part &p : parts)
			if (wanted(&r, p.name)) {
				size_t length = strlen(value);
				snprintf(value + length, sizeof value - length, "%s%016llx", length ? "-" : "", p.step(r.number));
			}
		step(&r, value);
	}
	done(&r);
}
