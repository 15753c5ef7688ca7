"""The KVStore, and how MXNet's trainers come by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError
from mxnet.kvstore import KVStoreBase

from gpucoll.integrations.mxnet.arrays import check, empty_like, view
from gpucoll.integrations.mxnet.engine import wait_to_write
from gpucoll.integrations.native import chosen

if TYPE_CHECKING:
    from gpucoll import Communicator

__all__ = ["Gpucoll", "broadcast_parameters", "register"]

TYPE = "dist_sync_gpucoll"
NAMES = ("gpucoll", TYPE)
_Arrays = list[mx.nd.NDArray]


class Gpucoll(KVStoreBase):
    """A store that sums arrays over all ranks, in their own memory.

    Every rank makes the same calls in the same order. A call waits for MXNet to finish with its
    arrays, and returns when the result is in them. `key` names the array, and only `push` and
    `pull` use it. A list of keys with a list of values (an array or a list of arrays for each key)
    is one fused call.

    Parameters
    ----------
    comm : Communicator, optional
        The ranks. Default, as in ``mx.kv.create("gpucoll")``: that of the latest `gpucoll.init`.

    Raises
    ------
    TypeError
        By all calls, before anything moves: an array is sparse or in a GPU's memory.
    gpucoll.MismatchError
        By all calls: the ranks passed arrays of different shapes or dtypes.
    """

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = chosen(comm, "KVStore gpucoll")
        self._kept: dict[Any, mx.nd.NDArray] = {}

    @property
    def type(self) -> str:
        """Return "dist_sync_gpucoll": MXNet reads in it that a step is one of all ranks.

        ``Module`` then divides gradients by the batch of all ranks.
        """
        return TYPE

    @property
    def rank(self) -> int:
        """Return this rank's number."""
        return self._comm.rank

    @property
    def num_workers(self) -> int:
        """Return the number of ranks."""
        return self._comm.world_size

    @staticmethod
    def is_capable(capability: str) -> bool:
        """Return False: the ranks' own optimizers make the steps, and gradients are dense."""
        return False

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Copy rank 0's `value` into `out` on every rank.

        Parameters
        ----------
        key : str, int or list of these
        value : NDArray, or a list with one for each key
            Of the same shape and dtype on all ranks.
        out : NDArray or list of NDArray, or a list with one of these for each key
        priority : int
            Not used.
        """
        values = [arrays[0] for arrays in _by_key(key, value)]
        self._move(values, _by_key(key, out), self._comm.broadcast, root=0)

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Write the sum over all ranks, and over the arrays of each key, into `out`.

        Parameters
        ----------
        key : str, int or list of these
        value : NDArray or list of NDArray, or a list with one of these for each key
            Of the same shape and dtype on all ranks.
        out : like `value`, optional
            Default: `value`.
        priority : int
            Not used.
        """
        values = _by_key(key, value)
        outs = values if out is None else _by_key(key, out)
        self._move([_sum(arrays) for arrays in values], outs, self._comm.all_reduce)

    def init(self, key: Any, value: Any) -> None:
        """Keep a copy of rank 0's `value`, for `pull`; see `broadcast` for the parameters."""
        copies = [empty_like(arrays[0], arrays[0].shape) for arrays in _by_key(key, value)]
        self.broadcast(key, value, copies if isinstance(key, list | tuple) else copies[0])
        self._kept.update(zip(_listed(key), copies, strict=True))

    def push(self, key: Any, value: Any, priority: int = 0) -> None:
        """Keep the sum over all ranks, for `pull`; see `pushpull` for the parameters."""
        sums = [empty_like(arrays[0], arrays[0].shape) for arrays in _by_key(key, value)]
        self.pushpull(key, value, sums if isinstance(key, list | tuple) else sums[0])
        self._kept.update(zip(_listed(key), sums, strict=True))

    def pull(self, key: Any, out: Any, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Copy what `init` or `push` kept into `out`; moves nothing between ranks.

        Raises
        ------
        KeyError
            Nothing was kept under a key.
        """
        for one, targets in zip(_listed(key), _by_key(key, out), strict=True):
            if one not in self._kept:
                raise KeyError(f"nothing was kept under key {one!r}: call init or push before pull")
            _copy_to(self._kept[one], targets)

    def row_sparse_pull(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            'KVStore "gpucoll" has dense arrays only: make parameters with stype and grad_stype '
            '"default", or use tostype("default")'
        )

    def set_gradient_compression(self, compression_params: Any) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(
            'KVStore "gpucoll" does not compress gradients: leave out compression_params'
        )

    def set_optimizer(self, optimizer: Any) -> None:
        """Raise NotImplementedError: there is no server that could run it."""
        raise _no_optimizer("set_optimizer")

    def save_optimizer_states(self, fname: str, dump_optimizer: bool = False) -> None:
        """Raise NotImplementedError: the trainer has the optimizer's states."""
        raise _no_optimizer("save_optimizer_states")

    def load_optimizer_states(self, fname: str) -> None:
        """Raise NotImplementedError: the trainer has the optimizer's states."""
        raise _no_optimizer("load_optimizer_states")

    def _move(
        self, values: _Arrays, outs: list[_Arrays], collective: Callable[..., Any], **options: Any
    ) -> None:
        """Call a collective on arrays when nothing in MXNet reads or writes them."""
        firsts = [targets[0] for targets in outs]
        is_in_place = all(x is y for x, y in zip(values, firsts, strict=True))
        for x in () if is_in_place else values:
            x.wait_to_read()
        wait_to_write([*{x.handle.value: x for x in firsts}.values()])
        results = [view(x) for x in firsts]
        sources = results if is_in_place else [view(x) for x in values]
        if len(sources) == 1:
            collective(sources[0], out=results[0], **options)
        else:
            collective(sources, out=results, **options)
        for targets in outs:
            _copy_to(targets[0], targets[1:])


def broadcast_parameters(
    params: Mapping[Any, Any], root: int = 0, comm: Communicator | None = None
) -> None:
    """Overwrite parameters by those of one rank, in one fused call.

    ``gluon.Trainer`` broadcasts parameters in its first step, when the first gradients are
    computed. Call this before, so that they are computed from the same parameters on every rank.

    Parameters
    ----------
    params : dict of NDArray or Parameter, or ParameterDict
        Such as ``net.collect_params()``.
    root : int
    comm : Communicator, optional
        Default: that of the latest `gpucoll.init`.

    Raises
    ------
    ValueError
        The shape of a parameter is not known yet.
    """
    arrays: _Arrays = []
    for name, value in sorted(params.items()):
        try:
            arrays += [value] if isinstance(value, mx.nd.NDArray) else value.list_data()
        except DeferredInitializationError as error:
            raise ValueError(
                f"the shape of {name} is not known yet: call the net once before "
                "broadcast_parameters"
            ) from error
    for x in arrays:
        check(x)
    if arrays:
        store = Gpucoll(comm)
        store._move(arrays, [[x] for x in arrays], store._comm.broadcast, root=root)


def register() -> None:
    """Make ``mx.kv.create("gpucoll")``, ``gluon.Trainer`` and ``Module`` find the store.

    MXNet's trainers leave out a store that they get by name, unless they have several devices or
    the name contains "dist"; and ``Module`` copies parameters into such a store and not back.
    """
    for name in NAMES:
        KVStoreBase.kv_registry.update({name: Gpucoll})
    for module in (mx.model, mx.module.module, mx.gluon.trainer):
        module._create_kvstore = _with_store(module._create_kvstore)
    for module in (mx.model, mx.module.module):
        module._initialize_kvstore = _with_broadcast(module._initialize_kvstore)


def _with_store(create: Callable[..., Any]) -> Callable[..., Any]:
    def create_kvstore(kvstore: Any, num_device: int, arg_params: Any) -> Any:
        if isinstance(kvstore, str) and kvstore.lower() in NAMES:
            kvstore = mx.kv.create(kvstore)
        return create(kvstore, num_device, arg_params)

    return create_kvstore


def _with_broadcast(initialise: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kvstore(
        kvstore: Any, param_arrays: Any, arg_params: Any, param_names: Any, update_on_kvstore: bool
    ) -> None:
        is_ours = isinstance(kvstore, Gpucoll)
        initialise(kvstore, param_arrays, arg_params, param_names, update_on_kvstore or is_ours)

    return initialize_kvstore


def _listed(key: Any) -> Sequence[Any]:
    return key if isinstance(key, list | tuple) else [key]


def _by_key(key: Any, arrays: Any) -> list[_Arrays]:
    """Return the arrays of each key; raise TypeError unless all are dense arrays on the host."""
    if isinstance(key, list | tuple):
        if not isinstance(arrays, list | tuple) or len(arrays) != len(key):
            raise ValueError(f"{len(key)} keys need a list of {len(key)} arrays, or lists of these")
        each = [[*x] if isinstance(x, list | tuple) else [x] for x in arrays]
    else:
        each = [[*arrays] if isinstance(arrays, list | tuple) else [arrays]]
    for x in (x for arrays in each for x in arrays):
        check(x)
    return each


def _sum(arrays: _Arrays) -> mx.nd.NDArray:
    """Return the sum of the arrays of this rank's devices; of one array: itself."""
    if len(arrays) == 1:
        return arrays[0]
    total = arrays[0].copy()
    for x in arrays[1:]:
        total += x.as_in_context(total.context)
    return total


def _copy_to(x: mx.nd.NDArray, targets: _Arrays) -> None:
    for target in targets:
        if target is not x:  # MXNet would warn
            x.copyto(target)


def _no_optimizer(name: str) -> NotImplementedError:
    return NotImplementedError(
        f'KVStore "gpucoll" runs no optimizer, so it has no {name}: leave update_on_kvstore out or '
        "set it to False, and save and load states by the trainer (Trainer.save_states)"
    )
