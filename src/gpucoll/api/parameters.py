"""Checks of the arguments from which a communicator is made."""

from __future__ import annotations

from gpucoll import config
from gpucoll.backends import BACKENDS
from gpucoll.backends.choice import DIRECT, GPU_BACKENDS, HOST_DEVICE, VENDOR_BACKENDS, Wish
from gpucoll.errors import ArgumentError, ArgumentTypeError, BackendUnavailableError


def parse(
    backend: str,
    device: object,
    mixed: bool,
    timeout_s: float | None,
    on_async_error: str | None,
    deterministic: str | None,
    direct_schedule: str | None,
) -> tuple[float, bool | None, Wish]:
    """Check the arguments; return the deadline, whether failures end the process, and the wish."""
    _check_mixed(mixed, backend)
    _check_backend(backend, mixed)
    config.check_timeout_s(timeout_s)
    limit = config.timeout_s() if timeout_s is None else timeout_s
    if on_async_error not in (None, "raise", "exit"):
        raise ArgumentError(f'on_async_error must be "raise" or "exit"; got {on_async_error!r}')
    if deterministic not in (None, "order"):
        raise ArgumentError(f'deterministic must be None or "order"; got {deterministic!r}')
    number = None if device is None else _device_number(device)
    exits = None if on_async_error is None else on_async_error == "exit"
    if direct_schedule is None:
        direct_schedule = config.direct_schedule()
    config.check_direct_schedule(direct_schedule, "direct_schedule")
    order = deterministic == "order"
    return limit, exits, Wish(backend, number, bool(exits), order, mixed, direct_schedule)


def _check_mixed(mixed: object, backend: object) -> None:
    if not isinstance(mixed, bool):
        raise ArgumentTypeError(f"mixed must be True or False; got {mixed!r}")
    if mixed and backend not in ("auto", DIRECT):
        raise ArgumentError(
            f"mixed=True needs backend='auto' or 'direct', not {backend!r}, which moves arrays of "
            "one kind only: leave backend= out"
        )


def _check_backend(backend: object, mixed: bool) -> None:
    if backend in GPU_BACKENDS and config.cpu_only() and not mixed:
        raise BackendUnavailableError(
            f"backend {backend!r} is not available: {config.CPU_ONLY} keeps this process on the CPU"
        )
    if backend != "auto" and backend not in BACKENDS:
        known = ", ".join(["auto", *BACKENDS])
        raise ArgumentError(f"backend must be one of {known}; got {backend!r}")


def _device_number(device: object) -> int:
    """Return a GPU's number."""
    if isinstance(device, str):
        kind, _, text = device.partition(":")
        if kind in (*VENDOR_BACKENDS, HOST_DEVICE, "hip", "xpu") and text.isdecimal():
            return int(text)
    for name in ("index", "id"):  # the attributes of PyTorch's and CuPy's devices
        if not isinstance(device, int | str) and isinstance(getattr(device, name, None), int):
            return int(getattr(device, name))
    if isinstance(device, bool) or not isinstance(device, int) or device < 0:
        raise ArgumentError(
            f'device must be a GPU\'s number, "cuda:1", or a device of a library; got {device!r}'
        )
    return device
