"""Frameworks that train, on two ranks: those programs of `examples/torch` that need a package more.

`requirements.txt` names the versions. Each program compares itself with one process.
"""

from __future__ import annotations

OWN = "2 ranks, backend gpucoll"
SAME_LOSSES = "the same losses as one process, up to rounding: True"
SAME_WEIGHTS = "the same weights as one process, up to rounding: True"


def test_deepspeed_with_zero_1_2_and_3(torchrun, needed):
    needed("deepspeed", "sklearn")

    lines = torchrun("examples/torch/deepspeed_zero.py", DS_ACCELERATOR="cpu").splitlines()

    stages = [lines.index(f"ZeRO, stage {stage}") for stage in (1, 2, 3)]
    assert [lines[begin + 1] for begin in stages] == [OWN] * 3
    assert [lines[begin + 7] for begin in stages] == [SAME_LOSSES] * 3, lines


def test_accelerate(torchrun, needed):
    needed("accelerate", "sklearn")

    lines = torchrun("examples/torch/accelerate_digits.py").splitlines()

    assert (lines[0], lines[-1]) == (OWN, SAME_LOSSES), lines


def test_transformers_trainer(torchrun, needed):
    needed("transformers", "accelerate")

    lines = torchrun("examples/torch/transformers_trainer.py", HF_HUB_OFFLINE="1").splitlines()

    assert (lines[-3], lines[-1]) == (OWN, SAME_WEIGHTS), lines


def test_lightning(torchrun, needed):
    needed("lightning", "sklearn")

    lines = torchrun("examples/torch/lightning_digits.py").splitlines()

    assert (lines[-7], lines[-1]) == (OWN, SAME_LOSSES), lines
