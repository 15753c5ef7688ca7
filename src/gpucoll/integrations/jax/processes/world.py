"""The processes of a JAX program, and communicators of some of them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import gpucoll
from gpucoll.errors import BackendUnavailableError
from gpucoll.integrations.jax.processes.clique import Clique

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["World"]


class World:
    """The processes.

    Parameters
    ----------
    comm : Communicator
        One of all processes, which serves nothing else.
    secret : str
        What processes of several hosts prove to each other that they belong together.
    timeout_s : float
        The deadline of each call.
    """

    def __init__(self, comm: Communicator, secret: str, timeout_s: float) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.world_size
        self._secret, self._timeout_s = secret, timeout_s
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._is_taken = False
        self._process_of_device: dict[int, int] = {}

    def process_of_device(self) -> Mapping[int, int]:
        """Return the process of each CPU device, by the device's number.

        JAX is asked once: at its end it has no devices any more, while XLA still works.
        """
        import jax

        if not self._process_of_device:
            devices = jax.devices("cpu")
            self._process_of_device = {device.id: device.process_index for device in devices}
        return self._process_of_device

    def clique(self, devices: tuple[int, ...], processes: Mapping[int, int]) -> Clique:
        """Return a clique of devices; it connects its processes when it is first used."""
        owners = [processes[device] for device in devices]
        takes_all = len(devices) == len(processes) and sorted(owners) == owners
        if takes_all and not self._is_taken:  # `comm` is connected already
            self._is_taken = True
            return Clique(owners, self.rank, lambda _: self.comm, self._timeout_s)
        word = hashlib.blake2b(repr(devices).encode(), digest_size=12).hexdigest()
        name = f"jax {word} {next(self._numbers[word])}"

        def connect(members: Sequence[int]) -> Communicator:
            return gpucoll.init(
                rank=list(members).index(self.rank),
                world_size=len(members),
                meet=_Store(name, self._secret) if len(members) > 1 else None,
                name=name,
                backend="cpu",
                timeout_s=self._timeout_s,
                on_async_error="raise",
            )

        return Clique(owners, self.rank, connect, self._timeout_s)

    def split(self, color: int, key: int) -> Clique:
        """Return a clique that all processes make together, each for its only device.

        For versions of jaxlib that have no object with the clique's devices.
        """
        import jax

        if jax.local_device_count("cpu") > 1:
            raise BackendUnavailableError(
                f"a process has {jax.local_device_count('cpu')} devices, which needs jaxlib 0.5 or "
                f"newer; this is {jax.__version__}: upgrade it, or use one device for each process"
            )
        comm = self.comm.split(color, key)
        assert comm is not None
        return Clique(comm.all_gather_object(self.rank), self.rank, lambda _: comm, self._timeout_s)


class _Store:
    """JAX's own store of keys and values, as a meeting point.

    Parameters
    ----------
    folder : str
        The folder of the keys.
    """

    def __init__(self, folder: str, secret: str) -> None:
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._folder, self._secret = f"gpucoll/{folder}", secret

    def secret(self) -> str:
        """Return the secret of the program."""
        return self._secret

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key.replace('/', ':')}"

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        with contextlib.suppress(Exception):  # it may be set already
            self._client.key_value_delete(self._path(key))
        self._client.key_value_set(self._path(key), value)

    def get(self, key: str) -> str | None:
        """Return a key's value; None: it is not set."""
        path = self._path(key)
        found: dict[str, str] = dict(self._client.key_value_dir_get(self._folder))
        return next((value for name, value in found.items() if name.endswith(path)), None)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return all(self.get(key) is not None for key in keys)

    def delete_key(self, key: str) -> None:
        """Delete a key."""
        self._client.key_value_delete(self._path(key))
