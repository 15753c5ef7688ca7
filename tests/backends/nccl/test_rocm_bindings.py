"""Numbers of RCCL and HIP against AMD's own Python bindings, which need no GPU and no ROCm."""

from __future__ import annotations

import ctypes

import pytest

from gpucoll.backends.nccl import prototypes
from gpucoll.backends.nccl.library import RCCL
from gpucoll.devices import hip

rccl = pytest.importorskip(
    "rocm.bindings.rccl", reason="no rocm-bindings-systems (extra test-gpu)", exc_type=ImportError
)


@pytest.mark.parametrize(
    "name", ["ncclResult_t", "ncclDataType_t", "ncclRedOp_t", "ncclScalarResidence_t"]
)
def test_enumerations(name):
    theirs = {member.name: int(member) for member in getattr(rccl, name)}
    ours = {member.name: int(member) for member in getattr(prototypes, name)}
    assert ours.items() <= theirs.items()
    further = {key for key in theirs if key not in ours}
    assert further <= {"ncclNumResults", "ncclNumTypes", "ncclNumOps", "ncclMaxRedOp"}


def test_the_unique_id():
    assert prototypes.NCCL_UNIQUE_ID_BYTES == rccl.NCCL_UNIQUE_ID_BYTES


@pytest.mark.parametrize("row", RCCL.prototypes, ids=lambda row: row.name)
def test_functions_exist(row):
    assert any(hasattr(rccl, name) for name in RCCL.spellings.get(row.name, (row.name,)))


def test_hip():
    bindings = pytest.importorskip(
        "rocm.bindings.hip", reason="no rocm-bindings-hip", exc_type=ImportError
    )
    names = {
        "multiprocessor_count": "hipDeviceAttributeMultiprocessorCount",
        "compute_capability_major": "hipDeviceAttributeComputeCapabilityMajor",
        "compute_capability_minor": "hipDeviceAttributeComputeCapabilityMinor",
        "virtual_memory_management": "hipDeviceAttributeVirtualMemoryManagementSupported",
        "dma_buf": "hipDeviceAttributeDmaBufSupported",
        "gpu_direct_rdma_with_virtual_memory": "hipDeviceAttributeGPUDirectRDMAWithHipVMMSupported",
        "stream_wait_value": "hipDeviceAttributeCanUseStreamWaitValue",
    }
    theirs = {ours: int(bindings.hipDeviceAttribute_t[name]) for ours, name in names.items()}
    assert theirs == hip.ATTRIBUTES
    assert int(bindings.hipError_t.hipErrorNotReady) == hip.HipDevice.not_ready
    assert int(bindings.hipError_t.hipErrorOutOfMemory) == 2
    assert int(bindings.hipMemcpyKind.hipMemcpyDefault) == 4
    assert (bindings.hipHostMallocPortable, bindings.hipHostMallocMapped) == (1, 2)
    assert (bindings.hipHostRegisterPortable, bindings.hipHostRegisterMapped) == (1, 2)
    assert (bindings.hipIpcMemLazyEnablePeerAccess, bindings.hipStreamWaitValueGte) == (1, 0)
    assert (bindings.hipStreamNonBlocking, bindings.hipEventDisableTiming) == (1, 2)
    for symbols in hip.VENDOR.symbols.values():  # there a macro adds which layout is meant
        assert hasattr(bindings, symbols[0].removesuffix("R0600"))


def test_where_the_architecture_lies():
    bindings = pytest.importorskip(
        "rocm.bindings.hip", reason="no rocm-bindings-hip", exc_type=ImportError
    )
    properties = bindings.hipDeviceProp_t()
    assert properties.c_sizeof() <= hip.PROPERTIES_BYTES
    address = properties.as_c_void_p().value
    ctypes.memmove(address + hip.ARCHITECTURE.start, b"gfx942:sramecc+\0", 16)
    assert properties.gcnArchName == "gfx942:sramecc+"
