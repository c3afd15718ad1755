// Copyright The gpuckpt Authors.
// SPDX-License-Identifier: Apache-2.0

// Package programs has the programs that the workloads are: their sources, and a list that says of
// each what it is, what it needs and what becomes of it. The tests run the list;
// docs/compatibility.md has a row for each entry of it.
package programs

import (
	"embed"
	"slices"
	"time"

	"github.com/gpuckpt/gpuckpt/images/annotations"
)

// Sources are the programs' files.
//
//go:embed *.py *.cu *.cuh *.h
var Sources embed.FS

// Program is one workload.
type Program struct {
	// Name is its test's, TestWorkloads/Name.
	Name string
	// What it is, for people who look for their own program.
	What string
	// File is its source, Python or CUDA C, and Args are what it gets beside --steps, --file and
	// --pause.
	File string
	Args []string
	// Module is what a Python program needs beside PyTorch; empty is nothing.
	Module string
	// Connected programs talk to themselves over TCP, in a network of their own.
	Connected bool
	// Shm is how large its /dev/shm is, in MiB; 0 is what the client makes it, 64.
	Shm int64
	// Annotations are its container's.
	Annotations map[string]string
	// Refused are words of the error with which a checkpoint is refused; none where it is not.
	Refused []string
	// WayRound says what to do about a refusal.
	WayRound string
	// GPU and Host are how much memory of a GPU, and of the machine with all checkpoints, a test
	// of it takes at most, in GiB.
	GPU, Host int64
	// Alone programs have kernels that wait for each other on two GPUs. Nothing runs beside them: several such programs
	// on the same GPUs failed when they were to be restored (docs/limits.md).
	Alone bool
	// Limit bounds a test of it.
	Limit time.Duration
}

// Named returns the program of that name, which must be in the list.
func Named(name string) Program {
	return List[slices.IndexFunc(List, func(p Program) bool { return p.Name == name })]
}

const (
	short = 3 * time.Minute
	long  = 6 * time.Minute
)

// withInterposer annotates a container that gets the interposer.
var withInterposer = map[string]string{annotations.Interposer: "true"}

// List is all of them. Those that take long come first, so that the others run beside them.
var List = []Program{
	{Name: "decoder", What: "decoder of Llama 3 8B's shape, KV cache, greedy tokens", File: "decoder.py", GPU: 38, Host: 44, Limit: long},
	{
		Name: "tensor-parallel", What: "decoder of Llama 3 8B's shape over two GPUs, NCCL in CUDA graphs, with the interposer", File: "tensor_parallel.py", Alone: true,
		Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 24, Host: 56, Limit: long,
	},
	{
		Name: "tensor-parallel-ipc", What: "decoder of Llama 3 8B's shape over two GPUs, NCCL by CUDA IPC in CUDA graphs, with the interposer", File: "tensor_parallel.py", Alone: true,
		Args: []string{"--variant", "ipc"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 24, Host: 56, Limit: long,
	},
	{Name: "compile", What: "`torch.compile`, default mode", File: "compiled.py", GPU: 3, Host: 28, Limit: long},
	{Name: "reduce-overhead", What: "`torch.compile`, `reduce-overhead`", File: "compiled.py", Args: []string{"--variant", "reduce-overhead"}, GPU: 3, Host: 28, Limit: long},
	{Name: "bert", What: "BERT base in training", File: "bert.py", GPU: 16, Host: 20, Limit: long},
	{Name: "resnet152", What: "torchvision's resnet152 in training", File: "train.py", Args: []string{"--model", "resnet152"}, GPU: 16, Host: 20, Limit: long},
	{Name: "eight", What: "eight processes on one GPU", File: "eight.cu", GPU: 10, Host: 14, Limit: short},
	{Name: "dataloader", What: "`DataLoader`, 4 workers, pinned memory", File: "dataloader.py", GPU: 2, Host: 12, Limit: short},
	{Name: "multiprocessing", What: "Python `multiprocessing` with CUDA", File: "processes.py", GPU: 2, Host: 12, Limit: short},
	{Name: "ddp", What: "DDP, two processes on one GPU, gloo", File: "ddp.py", Connected: true, GPU: 4, Host: 14, Limit: short},
	{Name: "nccl", What: "DDP, NCCL with one rank", File: "nccl.py", Connected: true, GPU: 3, Host: 10, Limit: short},
	{Name: "nccl-shm", What: "DDP, NCCL with two ranks over shared host memory", File: "nccl_ranks.py", Alone: true, Args: []string{"--variant", "shm"}, Connected: true, GPU: 4, Host: 20, Limit: short},
	{Name: "nccl-sockets", What: "DDP, NCCL with two ranks over sockets", File: "nccl_ranks.py", Alone: true, Args: []string{"--variant", "sockets"}, Connected: true, Shm: 1024, GPU: 4, Host: 20, Limit: short},
	{
		Name: "nccl-cumem", What: "DDP, NCCL with two ranks over NVLink, by exported handles", File: "nccl_ranks.py", Alone: true, Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024,
		Refused: []string{"shares GPU memory"}, WayRound: "the interposer, or `NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0`", GPU: 4, Host: 12, Limit: short,
	},
	{
		Name: "nccl-ipc", What: "DDP, NCCL with two ranks over NVLink, by CUDA IPC", File: "nccl_ranks.py", Alone: true, Args: []string{"--variant", "ipc"}, Connected: true, Shm: 1024,
		Refused: []string{"shares GPU memory"}, WayRound: "the interposer, or `NCCL_P2P_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0`", GPU: 4, Host: 12, Limit: short,
	},
	{
		Name: "nccl-cumem-interposer", What: "DDP, NCCL with two ranks over NVLink, by exported handles, with the interposer", File: "nccl_ranks.py", Alone: true,
		Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 4, Host: 20, Limit: short,
	},
	{
		Name: "nccl-ipc-interposer", What: "DDP, NCCL with two ranks over NVLink, by CUDA IPC, with the interposer", File: "nccl_ranks.py", Alone: true,
		Args: []string{"--variant", "ipc"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 4, Host: 20, Limit: short,
	},
	{
		Name: "nccl-bandwidth", What: "all-reduces of 1 GiB over NVLink, NCCL with two ranks, with the interposer", File: "nccl_bandwidth.py", Alone: true,
		Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 8, Host: 24, Limit: long,
	},
	{Name: "fsdp2-shm", What: "FSDP2, NCCL with two ranks over shared host memory", File: "fsdp2.py", Alone: true, Args: []string{"--variant", "shm"}, Connected: true, Shm: 1024, GPU: 6, Host: 24, Limit: short},
	{Name: "fsdp2-sockets", What: "FSDP2, NCCL with two ranks over sockets", File: "fsdp2.py", Alone: true, Args: []string{"--variant", "sockets"}, Connected: true, Shm: 1024, GPU: 6, Host: 24, Limit: short},
	{
		Name: "fsdp2-cumem-interposer", What: "FSDP2, NCCL with two ranks over NVLink, by exported handles, with the interposer", File: "fsdp2.py", Alone: true,
		Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 6, Host: 24, Limit: short,
	},
	{
		Name: "fsdp2-ipc-interposer", What: "FSDP2, NCCL with two ranks over NVLink, by CUDA IPC, with the interposer", File: "fsdp2.py", Alone: true,
		Args: []string{"--variant", "ipc"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 6, Host: 24, Limit: short,
	},
	{
		Name: "trainer", What: "Hugging Face `Trainer` with accelerate, two ranks over NVLink, with the interposer", File: "trainer.py", Module: "accelerate", Alone: true,
		Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 6, Host: 28, Limit: long,
	},
	{
		Name: "lightning", What: "Lightning, strategy `ddp`, two ranks over NVLink, with the interposer", File: "lightning_ddp.py", Module: "pytorch_lightning", Alone: true,
		Args: []string{"--variant", "cumem"}, Connected: true, Shm: 1024, Annotations: withInterposer, GPU: 4, Host: 24, Limit: long,
	},
	{Name: "jax", What: "JAX in training", File: "jax_training.py", Module: "jax", GPU: 4, Host: 8, Limit: short},
	{Name: "orbax", What: "JAX, Flax and Optax in training, saved by Orbax", File: "orbax_checkpoint.py", Module: "orbax.checkpoint", GPU: 4, Host: 10, Limit: short},
	{Name: "jax-inference", What: "JAX inference, KV cache, preallocated memory", File: "jax_inference.py", Module: "jax", GPU: 10, Host: 14, Limit: short},
	{
		Name: "jax-two-gpus", What: "JAX over two GPUs in one process", File: "jax_two_gpus.py", Module: "jax", Alone: true, Connected: true, Shm: 1024,
		Refused: []string{"reaches memory of one GPU from another"}, WayRound: "the interposer, or one GPU", GPU: 10, Host: 20, Limit: short,
	},
	{
		Name: "jax-two-gpus-interposer", What: "JAX over two GPUs in one process, with the interposer", File: "jax_two_gpus.py", Module: "jax", Alone: true, Connected: true, Shm: 1024,
		Annotations: withInterposer, GPU: 10, Host: 30, Limit: short,
	},
	{Name: "peft", What: "LoRA by PEFT on a Llama, gradient checkpointing", File: "peft_lora.py", Module: "peft", GPU: 4, Host: 12, Limit: short},
	{Name: "graphs", What: "CUDA graphs of PyTorch", File: "graphs.py", GPU: 2, Host: 8, Limit: short},
	{Name: "amp", What: "AMP and `GradScaler`", File: "amp.py", GPU: 2, Host: 8, Limit: short},
	{Name: "expandable", What: "`expandable_segments`", File: "allocators.py", Args: []string{"--variant", "expandable"}, GPU: 4, Host: 10, Limit: short},
	{Name: "async", What: "`cudaMallocAsync`", File: "allocators.py", Args: []string{"--variant", "async"}, GPU: 4, Host: 10, Limit: short},
	{Name: "cupy", What: "CuPy: streams, FFT, pinned pool, own kernels", File: "cupy_streams.py", Module: "cupy", GPU: 2, Host: 8, Limit: short},
	{Name: "triton", What: "Triton: autotuned and late kernels", File: "triton_kernels.py", Module: "triton", GPU: 2, Host: 8, Limit: short},
	{Name: "numba", What: "Numba: kernels, pinned and mapped memory", File: "numba_kernels.py", Module: "numba", GPU: 2, Host: 8, Limit: short},
	{Name: "notebook", What: "kernel such as Jupyter's, over ZMQ", File: "notebook.py", Module: "zmq", Connected: true, GPU: 2, Host: 10, Limit: short},
	{Name: "forks", What: "fork after CUDA began", File: "forks.py", GPU: 2, Host: 10, Limit: short},
	{Name: "nvml", What: "NVML monitor with CUDA", File: "nvml_monitor.py", Module: "pynvml", GPU: 2, Host: 8, Limit: short},
	{Name: "cuda-c", What: "CUDA C: all of the list below", File: "features.cu", GPU: 2, Host: 6, Limit: short},
	{
		Name: "ipc", What: "CUDA IPC (`torch.multiprocessing` with CUDA tensors)", File: "cuda_ipc.py", Refused: []string{"CUDA IPC"},
		WayRound: "the interposer, or share through host memory", GPU: 3, Host: 6, Limit: short,
	},
	{
		Name: "ipc-interposer", What: "CUDA IPC (`torch.multiprocessing` with CUDA tensors), with the interposer", File: "cuda_ipc.py",
		Annotations: withInterposer, GPU: 3, Host: 8, Limit: short,
	},
	{
		Name: "managed-small", What: "managed memory in allocations of up to 1 MiB, with the interposer", File: "managed.cu", Args: []string{"--parts", "small,"},
		Annotations: withInterposer, GPU: 2, Host: 4, Limit: short,
	},
	{
		Name: "profiler", What: "training under `torch.profiler`, which traces the GPU (CUPTI)", File: "profiler.py", Refused: []string{"profiler"},
		WayRound: "start it without the profiler", GPU: 2, Host: 6, Limit: short,
	},
	{
		Name: "graphics", What: "CUDA with a context of EGL on the same GPU", File: "graphics.py", Refused: []string{"uses a GPU for graphics"},
		WayRound: "draw without a GPU, or in another container", GPU: 2, Host: 6, Limit: short,
	},
	{
		Name: "managed", What: "managed memory (`cudaMallocManaged`, UVM)", File: "managed.cu", Refused: []string{"managed memory"},
		WayRound: "none: the driver refuses it; the interposer takes over allocations of up to 1 MiB", GPU: 2, Host: 4, Limit: short,
	},
}
