"""AMD's values of the differences between the two libraries.

Never executed on an AMD GPU so far: tested with a double that has RCCL's names, and with a
comparison of the enumerations with those of the `rocm-bindings-systems` wheel.
"""

from __future__ import annotations

from types import MappingProxyType

from gpucoll import config
from gpucoll.backends.nccl.prototypes import PROTOTYPES
from gpucoll.backends.nccl.vendor import BLOCKING, Vendor

RCCL = Vendor(
    name="RCCL",
    device_kind="rocm",
    variable=config.RCCL_LIBRARY,
    pattern=r"librccl\.so(\.1.*)?",
    wheels=("_rocm_sdk_libraries*/lib/librccl.so.1",),
    file_names=("librccl.so.1", "/opt/rocm/lib/librccl.so.1"),
    # RCCL numbers its versions as the NCCL that it follows: 2.18 came with ROCm 6.0.
    minimum=(2, 18, 0),
    prototypes=PROTOTYPES,
    spellings=MappingProxyType({"ncclAlltoAll": ("ncclAlltoAll", "ncclAllToAll")}),
    remedy="it comes with ROCm (package rccl), or name a copy in " + config.RCCL_LIBRARY,
    variables_to_mention=MappingProxyType({config.NCCL_COMM_BLOCKING: BLOCKING}),
    variables_to_set=MappingProxyType(
        {
            config.HSA_NO_SCRATCH_RECLAIM: "on MI300 and newer (gfx942, gfx950) RCCL ends the "
            "process at its first communicator with some versions of ROCm's runtime, or is slow: "
            "set it to 1"
        }
    ),
)
