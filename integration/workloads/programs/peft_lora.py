# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a small Llama in bfloat16 by LoRA, with PEFT: gradient checkpointing, dropout, AdamW.

Each step computes the layers twice, the second time with the random numbers of the first.
"""

from small_llama import WORDS, small_llama
from workload import Record, deterministic_torch, flip_bit, say, short, state, tensor_bytes

LENGTH, BATCH = 128, 8


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    import peft

    model = small_llama(torch, 512, 8).to(torch.bfloat16).cuda()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", r=8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    model = peft.get_peft_model(model, adapters).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    say("PEFT", peft.__version__, "trains", sum(weight.numel() for weight in trained), "weights")
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    data = torch.Generator(device="cuda").manual_seed(2)
    record.guards(lambda: flip_bit(trained[0]))
    for _ in range(record.steps):
        found = state(model, optimizer)
        words = torch.randint(WORDS, (BATCH, LENGTH), generator=data, device="cuda")
        optimizer.zero_grad()
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        record.step(f"{found}-{loss.item().hex()}")
    record.done(short(tensor_bytes(trained)).encode())


if __name__ == "__main__":
    main()
