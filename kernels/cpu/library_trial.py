"""A script that loads a library of kernels and checks that some of it works.

It imports nothing of gpucoll, and runs in a separate process, because a faulty library may crash
it. Its calls use constants, tables and external functions.
"""

from __future__ import annotations

import ctypes
import os
import sys

WORD = ctypes.c_int64


def function(library: ctypes.CDLL, name: str, n_arguments: int, returns: type | None) -> object:
    """Return a function of the library."""
    prototype = ctypes.CFUNCTYPE(returns, *[WORD] * n_arguments)
    return prototype((name, library))


def main(path: str) -> None:
    """Raise if something is wrong."""
    library = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL)
    sizes = (0, 1, 63, 64, 65, 1000, 4099)
    copy = function(library, "gpucoll_copy_none_none", 4, None)
    for size in sizes:
        source = ctypes.create_string_buffer(bytes(n % 251 for n in range(size)), size + 1)
        made = ctypes.create_string_buffer(size + 1)
        copy(ctypes.addressof(made), ctypes.addressof(source), size, 0)  # type: ignore[operator]
        if made.raw != source.raw:
            raise AssertionError(f"{size} bytes were not copied")
    add = function(library, "gpucoll_reduce_sum_float32", 7, None)
    for size in sizes:
        pair = [(ctypes.c_float * size)(*range(size)) for _ in range(2)]
        total = (ctypes.c_float * size)()
        sources = (WORD * 2)(*map(ctypes.addressof, pair))
        totals = (WORD * 1)(ctypes.addressof(total))
        tables = [ctypes.addressof(totals), 1, ctypes.addressof(sources), 2]
        add(*tables, size, 0, 0)  # type: ignore[operator]
        if list(total) != [2.0 * n for n in range(size)]:
            raise AssertionError(f"{size} numbers were not added")
    load = function(library, "gpucoll_transport_shared_ordering_word_load", 1, WORD)
    word = WORD(1234567890123)
    if load(ctypes.addressof(word)) != word.value:  # type: ignore[operator]
        raise AssertionError("a word was not loaded")


if __name__ == "__main__":
    main(sys.argv[1])
