"""Whether MPI is given addresses of GPUs: what doubles of it say, and trials that go wrong."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from gpucoll import config
from gpucoll.backends.direct import through_mpi
from gpucoll.backends.mpi import gpu_aware
from gpucoll.backends.mpi.gpu_aware import answer_of
from gpucoll.errors import ArgumentError

MPICH, INTEL = "MPICH Version: 5.0.2", "Intel(R) MPI Library 2021.18"
CRAY, MVAPICH = "MPI VERSION : CRAY MPICH version 8.1", "MVAPICH2 Version : 2.3.7"
OPEN = "Open MPI v5.0.11"
YES, NO = ("MPIX_Query_cuda_support", True), ("MPIX_Query_cuda_support", False)
SAYS = [  # kind, library, function's answer, memory kinds, environment, whether, why
    ("cuda", OPEN, YES, (), {}, True, "MPIX_Query_cuda_support() says yes"),
    ("cuda", OPEN, NO, (), {}, False, "MPIX_Query_cuda_support() says no"),
    ("cuda", OPEN, None, (), {}, False, "does not say whether it is CUDA-aware"),
    ("rocm", MPICH, None, (), {}, False, "does not say whether it is ROCm-aware"),
    ("cuda", MPICH, None, ("mpi", "system", "cuda"), {}, True, "mpi_memory_alloc_kinds names"),
    ("rocm", MPICH, None, ("mpi", "system", "cuda"), {}, False, "mpi, system, cuda alone"),
    ("rocm", MPICH, None, ("system", "hip"), {}, True, "system, hip"),
    ("cuda", MPICH, NO, ("cuda",), {}, False, "says no"),
    ("cuda", MPICH, YES, (), {"MPIR_CVAR_ENABLE_GPU": "0"}, False, "MPIR_CVAR_ENABLE_GPU=0"),
    ("cuda", OPEN, YES, (), {"OMPI_MCA_opal_cuda_support": "false"}, False, "=false switches"),
    ("rocm", OPEN, YES, (), {"OMPI_MCA_opal_cuda_support": "false"}, True, "says yes"),
    ("cuda", OPEN, YES, (), {"OMPI_MCA_accelerator": "null"}, False, "accelerator=null"),
    ("cuda", OPEN, YES, (), {"OMPI_MCA_accelerator": "^cuda"}, False, "accelerator=^cuda"),
    ("cuda", OPEN, YES, (), {"OMPI_MCA_accelerator": "^rocm,ze"}, True, "says yes"),
    ("cuda", OPEN, YES, (), {"OMPI_MCA_accelerator": "cuda"}, True, "says yes"),
    ("cuda", INTEL, YES, (), {}, False, "I_MPI_OFFLOAD is not set"),
    ("cuda", INTEL, YES, (), {"I_MPI_OFFLOAD": "1"}, True, "says yes"),
    ("cuda", INTEL, None, (), {"I_MPI_OFFLOAD": "1"}, True, "I_MPI_OFFLOAD=1"),
    ("rocm", CRAY, None, (), {}, False, "MPICH_GPU_SUPPORT_ENABLED is not set"),
    ("rocm", CRAY, None, (), {"MPICH_GPU_SUPPORT_ENABLED": "1"}, True, "ENABLED=1"),
    ("rocm", CRAY, None, (), {"MPICH_GPU_SUPPORT_ENABLED": "0"}, False, "=0 switches it off"),
    ("cuda", MVAPICH, None, (), {"MV2_USE_CUDA": "1"}, True, "MV2_USE_CUDA=1"),
    ("rocm", MVAPICH, None, (), {"MV2_USE_CUDA": "1"}, False, "MV2_USE_ROCM is not set"),
]


@pytest.mark.parametrize(("kind", "name", "said", "memory", "variables", "serves", "why"), SAYS)
def test_what_it_says(kind, name, said, memory, variables, serves, why):
    answer = answer_of(kind, name, said, memory, variables)
    assert answer.may_serve is serves
    assert why in answer.why


@pytest.mark.parametrize(
    ("says", "kind", "expected"),
    [
        ({"cuda": 1}, "cuda", YES),
        ({"cuda": 0}, "cuda", NO),
        ({}, "cuda", None),
        ({"cuda": 1}, "rocm", None),
        ({"rocm": 1}, "rocm", ("MPIX_Query_rocm_support", True)),
        ({"hip": 0}, "rocm", ("MPIX_Query_hip_support", False)),
    ],
)
def test_functions_of_the_library(doubles, says, kind, expected):
    assert gpu_aware.said_by(ctypes.CDLL(str(doubles.mpi(**says))), kind) == expected


class Info:
    """An info object of MPI's."""

    def __init__(self, kinds):
        self._kinds = kinds

    def Get(self, key):  # noqa: N802
        return self._kinds if key == "mpi_memory_alloc_kinds" else None

    def Free(self):  # noqa: N802
        pass


class Self:
    """COMM_SELF of an MPI that moves bytes, all but those from `but` on."""

    but = None

    def Irecv(self, given, source):  # noqa: N802
        self._landing, _ = given
        return self

    def Isend(self, given, dest):  # noqa: N802
        count = len(given[0]) if self.but is None else self.but
        ctypes.memmove(self._landing.address, given[0].address, count)
        return self


class Gpu:
    """What a trial asks of a device before it begins."""

    kind, number, label = "cuda", 0, "cuda:0"
    identity = SimpleNamespace(name="a GPU", uuid="GPU-0")
    runs = 0

    def driver_version(self):
        return "13.0"


def mpi_double(file=None, kinds=None, name=OPEN):
    """Return what stands for mpi4py's MPI over a double of the library."""
    world = SimpleNamespace(Get_info=lambda: Info(kinds))
    return SimpleNamespace(
        __file__=str(file), COMM_WORLD=world, Get_library_version=lambda: name, COMM_SELF=Self()
    )


def test_the_mpi_of_this_process(doubles, monkeypatch):
    monkeypatch.delenv(config.MPI_GPU_ARRAYS, raising=False)
    for variable in (*gpu_aware._SWITCHES["cuda"], *gpu_aware._COMPONENTS):
        monkeypatch.delenv(variable, raising=False)
    silent, yes = doubles.mpi(), doubles.mpi(cuda=1)

    assert gpu_aware.asked(mpi_double(yes), "cuda").may_serve
    assert not gpu_aware.asked(mpi_double(yes), "rocm").may_serve
    assert gpu_aware.asked(mpi_double(silent, "mpi,system,cuda:device"), "cuda").may_serve
    assert not gpu_aware.asked(mpi_double(silent), "cuda").may_serve
    assert gpu_aware.asked(mpi_double(silent), "host").may_serve


def test_the_environment_decides(doubles, monkeypatch):
    silent, yes = doubles.mpi(), doubles.mpi(cuda=1)
    monkeypatch.setenv(config.MPI_GPU_ARRAYS, "staged")
    for kind in ("cuda", "host"):
        answer = gpu_aware.asked(mpi_double(yes), kind)
        assert answer == (False, "GPUCOLL_MPI_GPU_ARRAYS=staged")
    monkeypatch.setenv(config.MPI_GPU_ARRAYS, "trusted")
    assert gpu_aware.asked(mpi_double(silent), "cuda").may_serve
    monkeypatch.setenv(config.MPI_GPU_ARRAYS, "please")
    with pytest.raises(ArgumentError, match=r"auto, staged or trusted; got 'please'"):
        gpu_aware.asked(mpi_double(yes), "cuda")


# --- all ranks agree ------------------------------------------------------------------------------


class Slots:
    """GPU memory, in these tests."""

    is_closed = False

    def close(self):
        self.is_closed = True


@pytest.fixture
def agree(doubles, monkeypatch):
    """Return what asks this rank, 1 of 3, with these answers of the others."""
    monkeypatch.delenv(config.MPI_GPU_ARRAYS, raising=False)
    slots = Slots()
    monkeypatch.setattr(through_mpi, "allocated_on_gpu", lambda *_, **__: (slots, ""))
    monkeypatch.setattr(through_mpi, "problem_of_kernels", lambda _: "")

    def ask(first, second, *, said=1, trial="", here=1):
        others = iter((first, second))
        tried = []

        def tell(mine):
            given = list(next(others))
            given[1:1] = [mine]
            return given

        def try_it(*_):
            tried.append(1)
            return trial

        monkeypatch.setattr(gpu_aware, "tried", try_it)
        mpi = mpi_double(doubles.mpi(cuda=said))
        group = SimpleNamespace(rank=1, world_size=3, here=here, over_mpi=SimpleNamespace(mpi=mpi))
        inner: Any = SimpleNamespace(group=group)
        gpu: Any = Gpu()
        found = through_mpi.slots_on_gpus(gpu, inner, 5.0, tell)
        return found.slots, found.why, len(tried), slots

    return ask


AWARE = [[0, True, "says yes"], [0, True, "says yes"]]


def test_all_ranks_take_gpu_memory(agree):
    found, why, tried, slots = agree(AWARE, [["", ""], ["", ""]])
    assert (found, tried) == (slots, 1)
    assert "MPIX_Query_cuda_support() says yes, and a trial has shown it" in why


def test_a_rank_without_kernels(agree):
    assert "reductions by the GPUs' kernels" in agree(AWARE, [["", ""], ["", ""]])[1]
    found, why, *_ = agree(AWARE, [["", ""], ["", "no NVRTC"]])
    assert found is not None
    assert why.endswith("reductions staged (rank 2: no NVRTC)")


def test_the_first_rank_of_a_host_tries(agree):
    assert agree(AWARE, [["", ""], ["", ""]], here=0)[2] == 0


def test_one_rank_that_cannot(agree):
    found, why, tried, _ = agree([[0, True, ""], [2, False, "it is old"]], [])
    assert (found, tried) == (None, 0)
    assert why == "staged through page-locked host memory: MPI of rank 2: it is old"
    assert "MPI of rank 1: MPIX_Query_cuda_support() says no" in agree(AWARE, [], said=0)[1]


def test_a_trial_on_another_host(agree):
    found, why, _, slots = agree(AWARE, [["a trial of it was killed by SIGSEGV", ""], ["", ""]])
    assert found is None
    assert slots.is_closed
    assert why.endswith(
        "MPI of rank 0 says that it takes GPU arrays, but a trial of it was killed by SIGSEGV"
    )


def test_a_trial_on_this_host(agree):
    found, why, tried, _ = agree(
        AWARE, [["", ""], ["", ""]], trial="a trial of it did not end within 30 s"
    )
    assert (found, tried) == (None, 1)
    assert "MPI of rank 1" in why
