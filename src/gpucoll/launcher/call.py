"""What travels between `gpucoll.launch` and its ranks: the call one way, a reply the other way.

The call lies in one file in memory that all ranks inherit, however many they are. A reply comes
through a pipe of the rank's own: its length, then a pickle of plain bytes and strings, so that it
can be read whatever is inside. What is inside (a result, an exception) is a pickle of its own,
opened by `gpucoll.launch` alone.
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
"""Gives the rank its communicator; `gpucoll.init` outside of the launcher's own tests."""


@dataclass(frozen=True)
class Reply:
    """How the function ended on one rank."""

    result: bytes | None
    """Pickle of what it returned; None if it failed."""
    exception: bytes | None = None
    """Pickle of what it raised; None if that cannot be pickled."""
    parts: bytes | None = None
    """Pickle of the exception's (class, args, attributes), for those that do not unpickle."""
    kind: str = ""
    """Name of the exception's class."""
    text: str = ""
    """The traceback, formatted where the source is at hand."""
    follows: bool = False
    """Whether another rank's failure led to it (PeerLostError, AbortedError)."""


def store_call(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], join: Join | None
) -> BinaryIO:
    """Pickle a call into an unnamed file that ranks can inherit.

    The file holds the caller's ``sys.path`` and ``sys.argv``, and then, as a pickle inside the
    pickle, the call itself: a rank can import nothing of it, not even gpucoll, before it has the
    path.
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
    """Return what `cloudpickle.dumps` does, with the files that functions are from.

    cloudpickle from 3.1.3 on puts ``<dynamic-code>`` in their place, and a traceback then shows
    neither the file nor its lines.
    """
    import cloudpickle

    reduce_code = cloudpickle.Pickler.dispatch_table[CodeType]

    def reduce_with_place(code: CodeType) -> tuple[Any, ...]:
        make, arguments, *_ = reduce_code(code)
        return make_code, (make, arguments, code.co_filename)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table = cloudpickle.Pickler.dispatch_table.new_child({CodeType: reduce_with_place})

    with io.BytesIO() as file:
        Pickler(file).dump(value)
        return file.getvalue()


def make_code(make: Callable[..., CodeType], arguments: tuple[Any, ...], place: str) -> CodeType:
    """Return a function's code as it was, from that file."""
    return make(*arguments).replace(co_filename=place)


def unnamed_file() -> BinaryIO:
    """Return a file in memory, or a deleted one on disk where that is forbidden."""
    try:
        return open(os.memfd_create("gpucoll-call"), "w+b")
    except (AttributeError, OSError):
        return tempfile.TemporaryFile()


@contextmanager
def by_value_if_unreachable(function: Callable[..., Any]) -> Iterator[None]:
    """Have the function's module pickled by value if a fresh process could not import it.

    cloudpickle does so for ``__main__``. A test module that pytest imported by its path, or a
    module that a notebook made, is out of a rank's reach all the same.
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
    """Return whether an import by the module's name would find this module's file."""
    file = getattr(module, "__file__", None)
    if file is None:  # built in, or made at run time
        return module.__name__ in sys.builtin_module_names
    try:
        spec = fresh_spec(module.__name__)
    except Exception:  # a finder of somebody's that does not like the question
        return True
    return (
        spec is not None
        and spec.origin is not None
        and os.path.realpath(spec.origin) == os.path.realpath(file)
    )


def fresh_spec(name: str) -> ModuleSpec | None:
    """Find a module as a process that has imported nothing would.

    `importlib.util.find_spec` looks first at what is imported already.
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
    """Return what a rank raised, or None: what cannot be unpickled, exits and interrupts."""
    exception: Any = None
    try:
        exception = pickle.loads(reply.exception or b"")
    except Exception:
        # Most often an __init__ that takes other arguments than it hands to Exception's.
        with suppress(Exception):
            kind, args, attributes = pickle.loads(reply.parts or b"")
            exception = kind.__new__(kind)
            exception.args = args
            exception.__dict__.update(attributes)
    return exception if isinstance(exception, Exception) else None


def frame(reply: Reply) -> bytes:
    """Return a reply as it goes through the pipe."""
    data = pickle.dumps(reply)
    return LENGTH.pack(len(data)) + data


class ReplyReader:
    """Puts one rank's reply together as it arrives. The descriptor is this reader's to close."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor
        self.at_end = False
        """Nothing more can come."""
        self._data = io.BytesIO()
        self._length: int | None = None

    def read(self) -> Reply | None:
        """Take what has arrived; return the reply once it is complete."""
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
        self._data = io.BytesIO()  # the reply has a copy
        assert isinstance(reply, Reply)
        return reply

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.descriptor)
