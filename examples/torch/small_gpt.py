"""A small GPT over bytes, built from a configuration, and a text for it from Python's own manual.

The parts of the attention and of the feed-forward network are separate linear layers, so that
tensor parallelism can divide each of them. The text is that of `help("if")`, which comes with
Python. Numbers are float64 by default, so the losses of several ranks differ from those of one
process only in the last digits.
"""

from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

BYTES = 256


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT."""

    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 32  # bytes
    dtype: torch.dtype = torch.float64


class Attention(nn.Module):
    """Causal attention with as many heads as the weights have: a rank may have some of them."""

    def __init__(self, config):
        super().__init__()
        self.head_width = config.width // config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x):
        """Return what each position gets from earlier ones; shape (batch, length, width)."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        heads = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x):
        """Return an array of the shape of ``x``."""
        return self.down(gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a feed-forward network, each with a norm before it and a sum after it."""

    def __init__(self, config):
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward = FeedForward(config)

    def forward(self, x):
        """Return an array of the shape of ``x``."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Embedding(nn.Module):
    """A vector for each byte and for its position, added."""

    def __init__(self, config):
        super().__init__()
        self.byte = nn.Embedding(BYTES, config.width)
        self.position = nn.Embedding(config.context, config.width)

    def forward(self, tokens):
        """Return an array of shape (batch, length, width)."""
        return self.byte(tokens) + self.position.weight[: tokens.shape[1]]


class Head(nn.Module):
    """Maps the last block's output to a score for each byte that may come next."""

    def __init__(self, config):
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.scores = nn.Linear(config.width, BYTES, bias=False)

    def forward(self, x):
        """Return an array of shape (batch, length, 256)."""
        return self.scores(self.norm(x))


def build(config, seed=0):
    """Return a GPT as a sequence of its parts; the seed makes it the same on every rank."""
    torch.manual_seed(seed)
    blocks = [Block(config) for _ in range(config.layers)]
    return nn.Sequential(Embedding(config), *blocks, Head(config)).to(config.dtype)


def loss_of(scores, targets):
    """Return the mean cross entropy of the actual next bytes."""
    return cross_entropy(scores.flatten(0, 1), targets.flatten())


def text():
    """Return Python's manual, as far as `help` contains it, as a 1-d tensor of bytes."""
    manual = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(manual.encode()), dtype=torch.uint8).long()


def batches(config, number, size=8, seed=1):
    """Yield inputs and targets, each (size, context): pieces of the text, chosen by the seed."""
    manual, random = text(), torch.Generator().manual_seed(seed)
    for _ in range(number):
        starts = torch.randint(len(manual) - config.context, (size, 1), generator=random)
        piece = manual[starts + torch.arange(config.context + 1)]
        yield piece[:, :-1], piece[:, 1:]


def optimizer_of(model):
    """Return the optimizer with which the programs of this folder train a GPT."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model, config, steps):
    """Train, and return the loss of each step."""
    optimizer = optimizer_of(model)
    losses = []
    for inputs, targets in batches(config, steps):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compare_with_one_process(losses, config):
    """Print losses, and whether one process that trains the whole model has the same ones.

    The longest sums are those of a weight's gradient, over the 256 bytes of a batch. Another order
    changes them by at most 256 u = 2.8e-14 of the sum of the magnitudes, which may be some hundred
    times the sum. The steps, 20 at most, add that up: 1e-10. If a part of a gradient is missing,
    the loss changes by over 1e-4.
    """
    print(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}")
    for step, loss in enumerate(losses):
        if step % 5 == 4:
            print(f"step {step:2}  loss {loss!r}")
    alone = train(build(config), config, len(losses))
    same = all(abs(a - b) <= 1e-10 * b for a, b in zip(losses, alone, strict=True))
    print(f"the same losses as one process, up to rounding: {same}")
