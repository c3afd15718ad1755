# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves a Llama of 1B shape over HTTP, by Hugging Face's continuous batching with paged attention.

	GET /generate?seed=N&words=K    the words that follow a prompt, which follows from N
	GET /health                     ok

All requests that wait are one batch; they share the pages of the cache, and those of equal prompts.
The batch is padded and runs as a CUDA graph. In double precision the sums' order, which depends on who
else is in the batch, does not change a word: a request has the answer that it has alone.
"""

import asyncio
import random

import serving
from workload import deterministic_torch, say

SHAPE = {
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32768,
}
PROMPT = 48  # words: a page and a half


class Batches:
    """Hands requests to the manager of batches, which has a thread of its own."""

    def __init__(self, manager):
        self.manager = manager
        self.number = 0

    async def generate(self, seed, words=32):
        done = asyncio.get_running_loop().create_future()

        def deliver(result):
            if not done.done():
                done.set_result(result)

        self.number += 1
        name = f"request-{self.number}"
        prompt = random.Random(seed).choices(range(SHAPE["vocab_size"]), k=PROMPT)
        self.manager.register_result_handler(name, deliver)
        if self.manager.add_request(prompt, request_id=name, max_new_tokens=words) is None:
            raise RuntimeError("the manager takes no requests")
        result = await done
        if result.error or not result.is_finished():
            raise RuntimeError(f"{name}: {result.error}")
        return {"words": result.generated_tokens}


def main():
    parser = serving.parser(__doc__)
    parser.add_argument("--dtype", choices=["float64", "float32", "bfloat16"], default="float64")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    torch = deterministic_torch()
    torch.use_deterministic_algorithms(False)  # paged attention has operations that are not in its list
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = serving.llama(getattr(torch, args.dtype), **SHAPE)
    model.set_attn_implementation("paged|sdpa")  # whatever else is installed
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            block_size=32,
            num_blocks=128,
            max_batch_tokens=64,
            max_memory_percent=0.2,  # of what is free; by default it is nearly all
            use_cuda_graph=not args.eager,
            q_padding_interval_size=64,
            kv_padding_interval_size=1024,
            use_async_batching=False,
        ),
    )
    manager.warmup()
    manager.start()
    torch.cuda.synchronize()
    say(torch.cuda.memory_allocated() >> 20, "MiB of GPU memory")
    serving.serve(args, {"/generate": Batches(manager).generate, "/health": serving.health})


if __name__ == "__main__":
    main()
