"""The kits themselves, on the host and through the look-alike: none runs first on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from tests.calls.gpu.kits import Guarded, TorchKit
from tests.dtypes import assert_same, dtype_of, small_values

from gpucoll.types import DTYPES

SHAPES = ((), (0,), (1,), (5,), (0, 3), (2, 3))


class HostTorchKit(TorchKit):
    """PyTorch's, with tensors on the host."""

    def bytes_of(self, values):
        return self.torch.from_numpy(values.copy())


def use(kit):
    """Write and read arrays of every dtype and shape, at two places; return how many."""
    n_arrays = 0
    for dtype in filter(kit.knows, DTYPES):
        for shape in SHAPES:
            for offset in (0, 16):
                values = small_values(dtype, int(np.prod(shape)), 3).reshape(shape)
                guarded = Guarded(kit, shape, dtype_of(dtype), offset)
                kit.write(guarded.array, values)
                guarded.check(f"{dtype} {shape}")
                assert tuple(guarded.array.shape) == shape
                assert_same(kit.read(guarded.array), values, f"{dtype} {shape}")
                n_arrays += 1
    return n_arrays


def test_pytorch():
    assert use(HostTorchKit(pytest.importorskip("torch"))) == len(DTYPES) * len(SHAPES) * 2


def test_cupys_look_alike(gpus):
    def use_in_rank(rank):
        return use(rank.kit)

    assert gpus.call_ranks(1, use_in_rank) == [len(DTYPES) * len(SHAPES) * 2]
