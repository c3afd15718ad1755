# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""A small LlamaForCausalLM of Hugging Face's transformers, made by its configuration and a seed."""

import os

# Nothing is to be fetched.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WORDS = 512


def small_llama(torch, width, layers):
    """Returns the model, in float32 on the host. Its attention is the one whose gradients are deterministic."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        use_cache=False,
    )
    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
