"""Libraries of vendors: which copies a process has, and binding by symbol."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest

from gpucoll.devices.foreign_library import (
    Prototype,
    bind,
    files_of_wheels,
    loaded_copies,
    open_library,
)

MAPS = """\
55d0-55d1 r--p 00000000 08:01 10 /usr/bin/python3
7f00-7f01 r--p 00000000 08:01 11 /usr/lib/libnccl.so.2.20.5
7f01-7f02 r-xp 00001000 08:01 11 /usr/lib/libnccl.so.2.20.5
7f02-7f03 r--p 00000000 08:01 12 /opt/with spaces/libnccl.so.2 (deleted)
7f03-7f04 r--p 00000000 08:01 13 /usr/lib/libnccl-net.so
7f04-7f05 r--p 00000000 08:02 11 /other/libnccl.so.2
7f06-7f07 rw-p 00000000 00:00 0
7f08-7f09 rw-p 00000000 00:00 0 [stack]
"""


def test_loaded_copies(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/maps").write_text(MAPS)

    assert loaded_copies(r"libnccl\.so(\.2.*)?", tmp_path) == [
        "/usr/lib/libnccl.so.2.20.5",
        "/opt/with spaces/libnccl.so.2",
        "/other/libnccl.so.2",
    ]
    assert loaded_copies("nothing", tmp_path) == []
    assert loaded_copies("libc.*", tmp_path / "without") == []


def test_files_of_wheels(tmp_path, monkeypatch):
    one, two = tmp_path / "one/vendor_b/lib/x.so.1", tmp_path / "two/vendor_a/lib/x.so.1"
    for path in (one, two, tmp_path / "two/other/lib/x.so.1"):
        path.parent.mkdir(parents=True)
        path.touch()
    folders = ["one", "none", "two"]
    monkeypatch.setattr("sys.path", ["", *(str(tmp_path / folder) for folder in folders)])

    assert list(files_of_wheels(["vendor_*/lib/x.so.1"])) == [str(one), str(two)]
    assert list(files_of_wheels([])) == []


def test_bind():
    name = ctypes.util.find_library("c")
    if name is None:
        pytest.skip("no C library is found by name")
    table = (
        Prototype("absolute", (ctypes.c_int,)),
        Prototype("strlen", (ctypes.c_char_p,), ctypes.c_size_t),
        Prototype("no_such_function", ()),
    )

    bound = bind(open_library(name), table, {"absolute": ("no_such_symbol", "abs")})

    assert set(bound) == {"absolute", "strlen"}
    assert bound["absolute"](-3) == 3
    assert bound["strlen"](b"four") == 4
    with pytest.raises(ctypes.ArgumentError):
        bound["absolute"]("three")


def test_two_tables_of_one_library_do_not_meet():
    name = ctypes.util.find_library("c")
    if name is None:
        pytest.skip("no C library is found by name")
    library = open_library(name)

    one = bind(library, [Prototype("abs", (ctypes.c_int,))])["abs"]
    bind(library, [Prototype("abs", (ctypes.c_double,), ctypes.c_double)])

    assert one(-3) == 3
