"""Hugging Face Transformers' Trainer on CPUs: a tiny Llama, built from a configuration.

Nothing is downloaded: the model begins with random weights and learns Python's manual by bytes.
With `use_cpu`, `TrainingArguments(ddp_backend=...)` accepts only "gloo", but Trainer uses an
existing process group as it is. So the only new line comes first:

    pip install transformers accelerate
    torchrun --nproc-per-node 2 examples/torch/transformers_trainer.py
    torchrun --nproc-per-node 2 examples/torch/transformers_trainer.py --backend gloo

(On GPUs `ddp_backend="gpucoll"` should do the same according to the Trainer's code; this has not
been run.) Rank 0 then trains alone on whole batches, and its weights are the same up to rounding.
"""

import argparse
import tempfile

import small_gpt
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 10
BATCH = 8
LEARNING_RATE = 0.05


def tiny_llama():
    """Return a model of 90 thousand weights; the seed makes it the same on every rank."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))


def pieces_of_text():
    """Return pieces of the manual in the Trainer's format, in training order."""
    (inputs, _), *_ = small_gpt.batches(small_gpt.Config(), 1, size=STEPS * BATCH)
    return [{"input_ids": piece, "labels": piece} for piece in inputs]


def train(model, pieces, folder):
    """Train with Trainer, and return the losses that it logs."""
    settings = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=BATCH // dist.get_world_size(),
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        optim="sgd",
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = Trainer(model, settings, train_dataset=pieces)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def train_alone(model, pieces):
    """Train one process on whole batches, without Trainer."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for first in range(0, len(pieces), BATCH):
        batch = torch.stack([piece["input_ids"] for piece in pieces[first : first + BATCH]])
        optimizer.zero_grad()
        model(batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # Trainer does this, too
        optimizer.step()


def same_weights(model, expected, start):
    """Return whether two models' weights are the same up to rounding.

    A gradient is a float32 sum over the 256 bytes of a batch. Another order changes it by at most
    256 u = 1.5e-5 of the sum of the magnitudes, which may be some ten times the sum. The bound is
    therefore 1e-3 of the change by training, with a margin. A rank's missing part changes it by
    tenths.
    """
    off, moved = 0.0, 0.0
    models = (each.parameters() for each in (model, expected, start))
    for one, other, before in zip(*models, strict=True):
        off = max(off, float((one - other).abs().max()))
        moved = max(moved, float((other - before).abs().max()))
    return off <= 1e-3 * moved


def main():
    """Train on all ranks, then on rank 0 alone."""
    model, pieces = tiny_llama(), pieces_of_text()
    with tempfile.TemporaryDirectory() as folder:
        losses = train(model, pieces, folder)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, backend {dist.get_backend()}")
        print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} at the end")
        alone = tiny_llama()
        train_alone(alone, pieces)
        with torch.no_grad():
            same = same_weights(model, alone, tiny_llama())
        print(f"the same weights as one process, up to rounding: {same}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--backend", default="gpucoll")
    dist.init_process_group(arguments.parse_args().backend)
    main()
    dist.destroy_process_group()
