"""Inference of a language model on CPUs: tensor-parallel decoding, with its speed.

Each rank has some heads of each attention and some rows of each feed-forward network of a small
GPT, and the keys and values of its heads. A step decodes one token of each sequence of the batch.
The only communication is an all_reduce of (batch, width) numbers after each attention and each
feed-forward network. The model is not trained, so the decoded text has no meaning.

    torchrun --nproc-per-node 2 examples/torch/tensor_parallel_decode.py
    torchrun --nproc-per-node 2 examples/torch/tensor_parallel_decode.py --beside gloo --rounds 9

`--beside` also decodes with other backends, in alternating rounds, and checks that the tokens are
the same. Rank 0 then checks that the whole model would have chosen the same tokens.
"""

import argparse
import statistics
import time

import small_gpt
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


def divided(layer, axis, rank, world_size):
    """Return a rank's part of a linear layer: some of its outputs (axis 0) or inputs (axis 1)."""
    weight = layer.weight.tensor_split(world_size, axis)[rank]
    part = nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)
    part.weight = nn.Parameter(weight.contiguous())
    if axis == 0:
        part.bias = nn.Parameter(layer.bias.tensor_split(world_size)[rank].contiguous())
    else:  # the sum over the ranks must include it once
        part.bias = nn.Parameter(layer.bias * (rank == 0))
    return part


def divide(model, rank, world_size):
    """Keep only this rank's part of a GPT's blocks."""
    for block in model[1:-1]:
        attention, feed_forward = block.attention, block.feed_forward
        for name in ("query", "key", "value"):
            part = divided(getattr(attention, name), 0, rank, world_size)
            setattr(attention, name, part)
        attention.out = divided(attention.out, 1, rank, world_size)
        feed_forward.up = divided(feed_forward.up, 0, rank, world_size)
        feed_forward.down = divided(feed_forward.down, 1, rank, world_size)


class Decoder:
    """A rank's part of a GPT, with the keys and values of the tokens that were decoded."""

    def __init__(self, model, group, batch, number):
        self.embedding, *self.blocks, self.head = model
        self.group = group
        self.position = 0
        self.keys, self.values = (
            [kept_of(block.attention, batch, number) for block in self.blocks] for _ in range(2)
        )
        self.in_all_reduce_s = 0.0

    def step(self, tokens):
        """Return the tokens that follow these, shape (batch,)."""
        x = self.embedding.byte(tokens) + self.embedding.position.weight[self.position]
        for block, keys, values in zip(self.blocks, self.keys, self.values, strict=True):
            normed = block.attention_norm(x)
            x = x + self.over_ranks(attend(block.attention, normed, keys, values, self.position))
            x = x + self.over_ranks(block.feed_forward(block.feed_forward_norm(x)))
        self.position += 1
        return self.head(x).argmax(-1)

    def over_ranks(self, x):
        """Return the sum over the ranks, and record how long it took."""
        begin = time.perf_counter()
        dist.all_reduce(x, group=self.group)
        self.in_all_reduce_s += time.perf_counter() - begin
        return x


def kept_of(attention, batch, number):
    """Return memory for the keys or values of a rank's heads: (batch, heads, number, width)."""
    heads = attention.query.out_features // attention.head_width
    return torch.zeros(batch, heads, number, attention.head_width)


def attend(attention, x, keys, values, position):
    """Return what this position gets from itself and earlier ones; shape (batch, width)."""
    query, key, value = (
        layer(x).unflatten(-1, (-1, 1, attention.head_width))
        for layer in (attention.query, attention.key, attention.value)
    )
    keys[:, :, position : position + 1] = key
    values[:, :, position : position + 1] = value
    until_now = slice(position + 1)
    heads = scaled_dot_product_attention(query, keys[:, :, until_now], values[:, :, until_now])
    return attention.out(heads.flatten(1))


@torch.inference_mode()
def decode(model, group, first, number):
    """Return the tokens, shape (batch, 1 + number), and the seconds in all and in all_reduce."""
    decoder = Decoder(model, group, len(first), number)
    tokens = [first]
    dist.barrier(group)
    begin = time.perf_counter()
    for _ in range(number):
        tokens.append(decoder.step(tokens[-1]))
    taken_s = time.perf_counter() - begin
    return torch.stack(tokens, 1), taken_s, decoder.in_all_reduce_s


@torch.inference_mode()
def would_choose(model, tokens):
    """Return whether a whole model chooses these tokens, or others with the same score.

    Scores are of the order of 1, from sums over a width of W in each layer, so rounding in float32
    moves them by some W u = 6e-8 W. The score of a wrong token is lower by some tenths.
    """
    scores = model(tokens[:, :-1])
    chosen = scores.gather(-1, tokens[:, 1:, None])[..., 0]
    return bool((chosen >= scores.amax(-1) - 1e-3).all())


def report(name, times_s, in_all_reduce_s, settings):
    """Print the medians of the rounds."""
    taken_s, within_s = statistics.median(times_s), statistics.median(in_all_reduce_s)
    print(
        f"{name:8} {settings.batch * settings.tokens / taken_s:10.0f} tokens/s, "
        f"{taken_s / settings.tokens * 1e6:8.0f} us a step, "
        f"{within_s / settings.tokens * 1e6:8.0f} us of it in all_reduce"
    )


def main(settings):
    """Decode with each backend in turn, and report."""
    if settings.heads % dist.get_world_size():
        raise ValueError(f"--heads must be a multiple of the number of ranks; got {settings.heads}")
    config = small_gpt.Config(
        settings.layers, settings.heads, settings.width, settings.tokens, torch.float32
    )
    names = [settings.backend, *settings.beside]
    groups = {name: dist.new_group(backend=name) for name in names}
    model = small_gpt.build(config)
    divide(model, dist.get_rank(), dist.get_world_size())
    first = torch.arange(settings.batch) % small_gpt.BYTES
    tokens, times_s, in_all_reduce_s = (
        {},
        {name: [] for name in names},
        {name: [] for name in names},
    )
    for turn in range(settings.rounds + 1):
        for name in names:
            tokens[name], taken_s, within_s = decode(model, groups[name], first, settings.tokens)
            if turn > 0:  # the first round is a warm-up
                times_s[name].append(taken_s)
                in_all_reduce_s[name].append(within_s)
    if dist.get_rank() == 0:
        number = 2 * settings.layers * settings.tokens
        print(f"{number} all_reduces of {4 * settings.batch * settings.width} bytes a round")
        for name in names:
            report(name, times_s[name], in_all_reduce_s[name], settings)
        same = all(tokens[name].equal(tokens[names[0]]) for name in names)
        print(f"the same tokens with each backend: {same}")
        right = would_choose(small_gpt.build(config), tokens[names[0]])
        print(f"the tokens that one process would choose: {right}")


def settings_of_command():
    """Return the command's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gpucoll")
    parser.add_argument("--beside", nargs="*", default=[], help="other backends to take turns with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16, help="sequences")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens of each sequence")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


if __name__ == "__main__":
    settings = settings_of_command()
    dist.init_process_group(settings.backend)
    main(settings)
    dist.destroy_process_group()
