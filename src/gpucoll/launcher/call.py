"""What travels between `gpucoll.launch` and its ranks: the call one way, a reply the other way.

The call is in one file in memory that all ranks inherit. A reply comes through a pipe of its rank:
first its length, then a pickle of plain bytes and strings, so that it can always be read. Its
contents (a result or an exception) are pickled separately, and only `gpucoll.launch` unpickles
them.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import Any, BinaryIO

__all__ = ["Join", "Reply", "ReplyReader", "frame", "revive", "store_call"]

LENGTH = struct.Struct("<Q")
READ_BYTES = 1 << 20

Join = Callable[[], AbstractContextManager[Any]]
"""Returns the rank's communicator. It is `gpucoll.init`, except in tests of the launcher alone."""


@dataclass(frozen=True)
class Reply:
    """How the function ended on one rank."""

    result: bytes | None
    """The pickled return value; None if the function failed."""
    exception: bytes | None = None
    """The pickled exception; None if it cannot be pickled."""
    parts: bytes | None = None
    """The pickled (class, args, attributes) of an exception that cannot be unpickled."""
    kind: str = ""
    """The name of the exception's class."""
    text: str = ""
    """The traceback, formatted on the rank, where the source is available."""
    follows: bool = False
    """Whether the failure of another rank caused this one (PeerLostError, AbortedError)."""


def store_call(
    function: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    join: Join | None,
) -> BinaryIO:
    """Pickle a call into an unnamed file that ranks can inherit.

    The file contains the caller's ``sys.path`` and ``sys.argv``, then the call itself as a pickle
    within the pickle: until a rank has set the path it cannot import anything that the call needs,
    not even gpucoll.
    """
    with by_value_if_unreachable(function):
        body = pickled_with_places((join, function, args, kwargs))
    file = unnamed_file()
    try:
        pickle.dump((list(sys.path), list(sys.argv), body), file)
        file.flush()
    except BaseException:
        file.close()
        raise
    return file


def pickled_with_places(value: object) -> bytes:
    """Pickle like `cloudpickle.dumps`, and keep the names of the files that define functions.

    From 3.1.3 on, cloudpickle replaces these names by ``<dynamic-code>``, and a traceback then
    shows neither the file nor its lines.
    """
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce_with_place(code: CodeType) -> tuple[object, ...]:
        make, arguments, *_ = reduce_code(code)
        return make_code, (make, arguments, code.co_filename)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: reduce_with_place})

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def make_code(make: Callable[..., CodeType], arguments: tuple[object, ...], place: str) -> CodeType:
    """Return a function's code with the name of its original file."""
    return make(*arguments).replace(co_filename=place)


def unnamed_file() -> BinaryIO:
    """Return an anonymous file in memory, or a deleted one on disk if that is forbidden."""
    try:
        return open(os.memfd_create("gpucoll-call"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


@contextmanager
def by_value_if_unreachable(function: Callable[..., object]) -> Iterator[None]:
    """Pickle the function's module by value within the block if a fresh process cannot import it.

    cloudpickle does this only for ``__main__``. But a rank cannot import a test module that pytest
    imported by its path either, nor a module made in a notebook.
    """
    import cloudpickle

    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if (
        module is None
        or module.__name__ == "__main__"
        or is_importable(module)
        or module.__name__ in cloudpickle.list_registry_pickle_by_value()
    ):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def is_importable(module: ModuleType) -> bool:
    """Return whether importing the module's name would find this module's file."""
    file = getattr(module, "__file__", None)
    if file is None:  # a built-in module, or one made at run time
        return module.__name__ in sys.builtin_module_names
    try:
        spec = fresh_spec(module.__name__)
    except Exception:  # a third party's finder may raise anything
        return True
    return (
        spec is not None
        and spec.origin is not None
        and os.path.realpath(spec.origin) == os.path.realpath(file)
    )


def fresh_spec(name: str) -> ModuleSpec | None:
    """Return the spec that a process without any imports would find for a module.

    `importlib.util.find_spec` would return the spec of the imported module instead.
    """
    parent, _, _ = name.rpartition(".")
    path = None
    if parent:
        parent_spec = fresh_spec(parent)
        if parent_spec is None or parent_spec.submodule_search_locations is None:
            return None
        path = parent_spec.submodule_search_locations
    specs = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def revive(reply: Reply) -> Exception | None:
    """Return a rank's exception; None for exits, interrupts and what cannot be unpickled."""
    exception: Any = None
    try:
        exception = pickle.loads(reply.exception or b"")
    except Exception:
        # The usual cause is an __init__ whose arguments are not those that it passes to Exception.
        with suppress(Exception):
            kind, args, attributes = pickle.loads(reply.parts or b"")
            exception = kind.__new__(kind)
            exception.args = args
            exception.__dict__.update(attributes)
    return exception if isinstance(exception, Exception) else None


def frame(reply: Reply) -> bytes:
    """Encode a reply for the pipe."""
    data = pickle.dumps(reply)
    return LENGTH.pack(len(data)) + data


class ReplyReader:
    """Assembles one rank's reply as it arrives. The reader owns the descriptor."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.at_end = False
        """Whether nothing more can arrive."""
        self._data = io.BytesIO()
        self._length: int | None = None

    def read(self) -> Reply | None:
        """Read what has arrived; return the reply once it is complete."""
        while True:
            try:
                piece = os.read(self.descriptor, READ_BYTES)
            except BlockingIOError:
                return None
            if not piece:
                self.at_end = True
                return None
            self._data.write(piece)
            if reply := self._complete():
                return reply

    def _complete(self) -> Reply | None:
        size = self._data.tell()
        if self._length is None and size >= LENGTH.size:
            (self._length,) = LENGTH.unpack(self._data.getbuffer()[: LENGTH.size])
        if self._length is None or size < LENGTH.size + self._length:
            return None
        reply = pickle.loads(self._data.getbuffer()[LENGTH.size :])
        self._data = io.BytesIO()  # the reply has a copy of the data
        assert isinstance(reply, Reply)
        return reply

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)
