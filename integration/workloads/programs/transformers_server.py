# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Serves Hugging Face's Llama of the shape of Llama 3 8B over HTTP, by generate().

	GET /next?session=N&words=K    the next words of a session, and a digest of the last logits
	GET /checksum                  a number over weights and caches: one bit changes it
	GET /health                    ok

The weights are made up, in bfloat16: 15 GiB. Each session has a cache of keys and values of its own,
which grows. What a session answers follows from what it has said before, and from nothing else.
"""

import asyncio
import concurrent.futures

import serving
from workload import checksum, deterministic_torch, say, short, tensor_bytes

SHAPE = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}


class Sessions:
    """The sessions of a model. One thread does all of its work, a question at a time."""

    def __init__(self, model, count):
        import transformers

        self.model = model
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.words = [[session + 1] for session in range(count)]  # the first one nobody said
        self.caches = [transformers.DynamicCache() for _ in range(count)]

    def generate(self, session, words):
        import torch

        said = self.words[session]
        if words < 1 or len(said) + words > self.model.config.max_position_embeddings:
            raise ValueError(f"no room for {words} words")
        given = torch.tensor([said], device="cuda")
        result = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            past_key_values=self.caches[session],
            max_new_tokens=words,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        new = result.sequences[0, len(said) :].tolist()
        said += new
        return {"words": new, "place": len(said) - 1, "logits": short(tensor_bytes([result.logits[-1]]))}

    def sum(self):
        tensors = list(self.model.parameters())
        for cache in self.caches:
            if cache.get_seq_length():
                tensors += [kept.contiguous() for layer in cache.layers for kept in (layer.keys, layer.values)]
        return {"checksum": checksum(tensors), "places": [len(said) - 1 for said in self.words]}

    async def next(self, session, words=1):
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.generate, session, words)

    async def checksum(self):
        return await asyncio.get_running_loop().run_in_executor(self.thread, self.sum)


def main():
    parser = serving.parser(__doc__)
    parser.add_argument("--sessions", type=int, default=8)
    args = parser.parse_args()
    torch = deterministic_torch()
    sessions = Sessions(serving.llama(torch.bfloat16, **SHAPE), args.sessions)
    sessions.thread.submit(sessions.generate, args.sessions - 1, 2).result()  # loads the kernels
    torch.cuda.synchronize()
    say(torch.cuda.memory_allocated() >> 20, "MiB of GPU memory")
    serving.serve(args, {"/next": sessions.next, "/checksum": sessions.checksum, "/health": serving.health})


if __name__ == "__main__":
    main()
