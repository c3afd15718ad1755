# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""What the servers of Hugging Face's models have in common: a model with made-up weights, and HTTP.

The server is aiohttp on uvloop. "ready" on standard output says that it listens.
"""

import argparse

from workload import say


def parser(description):
    """Returns a parser of the options that all servers have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--port", type=int, required=True)
    options.add_argument("--address", default="127.0.0.1")
    return options


def llama(dtype, **shape):
    """Returns a Llama on the GPU whose weights follow from PyTorch's seed. No word ends its answers."""
    import torch
    import transformers

    say("transformers", transformers.__version__)
    config = transformers.LlamaConfig(
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        **shape,
    )
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def serve(args, answers):
    """Serves until the process ends. answers has a coroutine function for each path.

    It takes the query's numbers by name and returns what JSON can say. A question that it cannot
    answer is one with KeyError, IndexError or ValueError.
    """
    import uvloop
    from aiohttp import web

    def handler(answer):
        async def handle(request):
            try:
                return web.json_response(await answer(**{name: int(value) for name, value in request.query.items()}))
            except (KeyError, IndexError, TypeError, ValueError) as err:
                raise web.HTTPBadRequest(text=repr(err)) from err

        return handle

    app = web.Application()
    for path, answer in answers.items():
        app.router.add_get(path, handler(answer))
    web.run_app(
        app,
        host=args.address,
        port=args.port,
        loop=uvloop.new_event_loop(),
        print=lambda *_: print("ready", flush=True),  # it is called once the server listens
        access_log=None,
    )


async def health():
    """Answers that the server is there."""
    return {"ok": True}
