# Copyright The gpuckpt Authors.
# SPDX-License-Identifier: Apache-2.0
"""Four sequences of greedy decoding by a model of the shape of Llama 3 8B, with 1 GiB of KV cache."""

from workload import Record, checksum, deterministic_torch, flip_bit, say, short, tensor_bytes


def main():
    record = Record(__doc__)
    torch = deterministic_torch()
    import llama

    slots = 4
    model = llama.Decoder(slots, llama.sequence_length(1, slots))
    say(torch.cuda.memory_allocated() >> 20, "MiB of GPU memory")
    record.guards(lambda: flip_bit(model.layers[17]["up"]))
    words = [11, 222, 3333, 44444]
    for place in range(record.steps):
        logits = model.step(words, 0, place)
        words = logits.argmax(-1).tolist()
        # The whole of it takes a quarter of a second.
        found = checksum(model.tensors()) + "-" if place % 20 == 0 else ""
        record.step(found + "-".join(map(str, words)) + "-" + short(tensor_bytes([logits])))
    record.done(checksum(model.tensors()).encode())


if __name__ == "__main__":
    main()
