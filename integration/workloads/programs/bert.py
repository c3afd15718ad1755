# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Trains an encoder of BERT base's size: 12 layers of 768, 12 heads, 110 million parameters.

It predicts masked words of made-up sentences, with dropout, AdamW and a learning rate that rises.
"""

from workload import Record, deterministic_torch, flip_bit, short, state, tensor_bytes

WORDS, LENGTH, BATCH, WIDTH = 30522, 128, 16, 768


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.words = torch.nn.Embedding(WORDS, WIDTH)
            self.places = torch.nn.Embedding(LENGTH, WIDTH)
            layer = torch.nn.TransformerEncoderLayer(
                WIDTH, 12, 4 * WIDTH, dropout=0.1, activation="gelu", batch_first=True
            )
            self.layers = torch.nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
            self.head = torch.nn.Linear(WIDTH, WORDS)

        def forward(self, words):
            return self.head(self.layers(self.words(words) + self.places.weight))

    model = Encoder().cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 50))
    loss_of = torch.nn.CrossEntropyLoss()
    data = torch.Generator(device="cuda").manual_seed(2)
    record.guards(lambda: flip_bit(model.head.weight))
    # Its backward pass is deterministic, those of the fused kernels for fp32 are not.
    with sdpa_kernel(SDPBackend.MATH):
        for _ in range(record.steps):
            found = state(model, optimizer)
            words = torch.randint(WORDS, (BATCH, LENGTH), generator=data, device="cuda")
            masked = torch.rand(BATCH, LENGTH, generator=data, device="cuda") < 0.15
            masked[0, 0] = True
            optimizer.zero_grad()
            said = model(words.masked_fill(masked, 103))
            loss = loss_of(said[masked], words[masked])
            loss.backward()
            optimizer.step()
            schedule.step()
            record.step(f"{found}-{loss.item().hex()}")
    record.done(short(tensor_bytes(model.parameters())).encode())


if __name__ == "__main__":
    main()
