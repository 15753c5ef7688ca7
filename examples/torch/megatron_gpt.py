"""Megatron-Core's GPT on CPUs with tensor parallelism, as far as this works without a GPU.

Megatron-Core's parallel layers, embedding and cross entropy divide a GPT among two ranks. Only the
core of its attention, which allocates GPU memory, is replaced, and PyTorch's own optimizer is used.
gpucoll is only named as the backend in `init_process_group`:

    pip install megatron-core
    torchrun --nproc-per-node 2 examples/torch/megatron_gpt.py
    torchrun --nproc-per-node 2 examples/torch/megatron_gpt.py --backend gloo

Every rank then trains the whole model alone; the losses are the same up to rounding.
"""

import argparse

import small_gpt
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn.functional import scaled_dot_product_attention

TEXT = small_gpt.Config()


class CausalAttention(torch.nn.Module):
    """The core of attention for Megatron-Core, on arrays of shape (length, batch, heads, width)."""

    def __init__(self, **_):
        super().__init__()

    def forward(self, query, key, value, *_, **__):
        """Return what each position gets from earlier ones: (length, batch, heads * width)."""
        by_heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        heads = scaled_dot_product_attention(*by_heads, is_causal=True)
        return heads.permute(2, 0, 1, 3).flatten(2)


def build(ranks):
    """Return Megatron-Core's GPT for a number of ranks; the weights do not depend on it."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        tensor_model_parallel_size=ranks,
        use_cpu_initialization=True,
        hidden_dropout=0,
        attention_dropout=0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    torch.manual_seed(0)
    return GPTModel(config, layer, vocab_size=small_gpt.BYTES, max_sequence_length=TEXT.context)


def train(ranks, steps=15):
    """Train a GPT that is divided among `ranks` ranks; return the loss of each step."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    model = build(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for inputs, targets in small_gpt.batches(TEXT, steps):
        positions = torch.arange(TEXT.context).expand_as(inputs)
        optimizer.zero_grad()
        loss = model(inputs, positions, None, labels=targets).mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    parallel_state.destroy_model_parallel()
    return losses


def main():
    """Train on all ranks, then on each rank alone."""
    losses, alone = train(dist.get_world_size()), train(1)
    # A gradient is a float32 sum over the 256 bytes of a batch. Another order changes it by at most
    # 256 u = 1.5e-5 of the sum of the magnitudes. Such a gradient moves the loss by a fifth, so the
    # loss changes by less; 1e-4 leaves a margin. A wrong gradient changes the loss by over 1e-2.
    same = all(abs(a - b) <= 1e-4 * b for a, b in zip(losses, alone, strict=True))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}")
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")
        print(f"the same losses as one process, up to rounding: {same}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
