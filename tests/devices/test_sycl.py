"""Why there is no SYCL device; what one does is in ``tests/backends/oneccl/test_sycl.py``."""

from __future__ import annotations

import ctypes.util

import pytest

from gpucoll import devices
from gpucoll.devices import sycl
from gpucoll.errors import BackendError, BackendUnavailableError


@pytest.fixture
def found(monkeypatch):
    """Set which library is found as dpctl's, and which functions it has."""

    def find(path, names=()):
        monkeypatch.setattr(sycl, "files_of_wheels", lambda patterns: iter([path] if path else []))
        functions = {name: lambda *_: 0 for name in names}
        if names:
            monkeypatch.setattr(sycl, "bind", lambda *_: functions)

    return find


ALL = [row.name for row in sycl._PROTOTYPES]


def test_without_dpctl(found):
    found("")
    with pytest.raises(BackendUnavailableError, match="dpctl's C interface to SYCL, which is not"):
        sycl.SyclDriver()


def test_one_that_cannot_be_loaded(found, tmp_path):
    found(str(tmp_path / "libDPCTLSyclInterface.so"))
    with pytest.raises(BackendUnavailableError, match=r"cannot be loaded: .*pip install dpctl"):
        sycl.SyclDriver()


def test_an_old_one(found):
    found(ctypes.util.find_library("c"))
    with pytest.raises(
        BackendUnavailableError, match="is too old: it has no DPCTLDeviceMgr_GetDev"
    ):
        sycl.SyclDriver()


def test_two_copies_of_sycl(found, monkeypatch):
    """A queue is a pointer to an object of one copy, which the other would misread."""
    found(ctypes.util.find_library("c"), ALL)
    copies = ["/a/libsycl.so.8.0.0", "/b/libsycl.so.9.0.0"]
    monkeypatch.setattr(sycl, "loaded_copies", lambda pattern: copies)
    with pytest.raises(
        BackendUnavailableError, match=r"2 copies of SYCL, /a/libsycl.* and /b/libs"
    ):
        sycl.SyclDriver()


def test_without_a_gpu(found):
    found(ctypes.util.find_library("c"), ALL)
    driver = sycl.SyclDriver()
    assert driver.devices == []
    assert driver.device_of(1) is None
    with pytest.raises(BackendUnavailableError, match="sycl:0 is not there: SYCL sees 0 GPUs"):
        sycl.SyclDevice(driver, 0)


def test_errors_without_a_text(found):
    """SYCL's exceptions end in dpctl, which returns no handle then."""
    found(ctypes.util.find_library("c"), ALL)
    driver = sycl.SyclDriver()
    driver.devices = [1]
    with pytest.raises(BackendError, match="sycl:0: cannot make a queue: SYCL has raised"):
        sycl.SyclDevice(driver, 0)


def test_it_is_a_kind_of_device():
    assert devices.KINDS["sycl"] == "gpucoll.devices.sycl"
