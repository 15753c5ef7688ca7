"""Run by tests, in ranks: dpctl's memory through SYCL queues, with oneCCL's CPU plug-in behind it.

The CPU is the SYCL device, whose memory the plug-in can read. It has no devices to set, so that is
left out; all else is what ranks with Intel GPUs run.
"""

from __future__ import annotations

import os

import dpctl
import dpctl.memory
import numpy as np

import gpucoll
from gpucoll.backends.oneccl import library
from gpucoll.devices import sycl
from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError

QUEUE = dpctl.SyclQueue("cpu", property="in_order")


class Array:
    """A contiguous array in memory of dpctl, as dpnp's are."""

    def __init__(self, values):
        self.values = values
        self.memory = dpctl.memory.MemoryUSMDevice(values.nbytes, queue=QUEUE)
        self.memory.copy_from_host(values.view(np.uint8).reshape(-1))

    @property
    def __sycl_usm_array_interface__(self):
        given = dict(self.memory.__sycl_usm_array_interface__)
        given |= {"typestr": self.values.dtype.str, "shape": self.values.shape}
        return {**given, "data": (given["data"][0], False)}

    def read(self):
        QUEUE.wait()
        return self.memory.copy_to_host().view(self.values.dtype).tolist()


def raises(kind, text, call):
    said = ""
    try:
        call()
    except kind as error:
        said = str(error)
    assert text in said


def main():
    """Call what can be called; the errors of what cannot."""
    rank, size = int(os.environ["GPUCOLL_RANK"]), int(os.environ["GPUCOLL_WORLD_SIZE"])
    sycl.DEVICES[0] = sycl.ALL_CPUS
    library.load().functions.__dict__["onecclSetDevice"] = lambda _: 0
    os.environ["ZE_AFFINITY_MASK"] = str(rank)  # as if each rank had a GPU of its own
    os.environ["CCL_YIELD"] = "sleep"
    all_of = np.stack([np.arange(6, dtype=np.float32) + at for at in range(size)])
    with gpucoll.init(backend="oneccl", timeout_s=30, device="sycl:0") as comm:
        x, y = Array(all_of[rank]), Array(np.zeros(6, np.float32))
        comm.all_reduce(x, out=y)
        comm.check()
        assert y.read() == all_of.sum(0).tolist()
        work = comm.all_reduce(x, out=y, op="max", async_op=True)
        work.wait()
        work.synchronize()
        assert y.read() == all_of.max(0).tolist()
        gathered = Array(np.zeros(6 * size, np.float32))
        comm.all_gather(x, out=gathered, stream=QUEUE)
        comm.check()
        assert gathered.read() == all_of.reshape(-1).tolist()
        with comm.group():
            comm.send(x, (rank + 1) % size)
            comm.recv(source=(rank - 1) % size, out=y)
        comm.check()
        assert y.read() == all_of[rank - 1].tolist()
        short, out = Array(np.ones(3, np.int16)), Array(np.ones(3, np.int16))
        kernels = "gpucoll has no kernels for Intel GPUs that could: copy to the host"
        raises(ArgumentTypeError, kernels, lambda: comm.all_reduce(short, out=out))
        raises(ArgumentTypeError, kernels, lambda: comm.all_reduce(x, out=y, compression="float16"))
        raises(ArgumentError, "give out=", lambda: comm.all_reduce(x))
        facts = comm.describe().facts
        assert facts["GPU"].startswith("sycl:0: "), facts
        assert "never been executed on an Intel GPU" in facts["note"]
    text = "the direct backend does not serve Intel GPUs"
    raises(BackendUnavailableError, text, lambda: gpucoll.init(backend="direct", timeout_s=30))
    print("passed")


if __name__ == "__main__":
    main()
