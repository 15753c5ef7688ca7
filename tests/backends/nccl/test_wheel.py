"""The real libnccl of the nvidia-nccl wheel, without a GPU: it loads, and refuses clearly."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import re
from pathlib import Path

import pytest
from tests.doubles import run_python

from gpucoll import devices
from gpucoll.backends.nccl import prototypes
from gpucoll.backends.nccl.library import NCCL


def wheel():
    """Return the folder that the wheel unpacks to, or None."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = [Path(folder) / "nccl" for folder in folders]
    return next((folder for folder in found if (folder / "lib/libnccl.so.2").is_file()), None)


FOLDER = wheel()
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="no NCCL wheel: pip install nvidia-nccl-cu12 (extra test-gpu)"
)


def in_new_process(code):
    return json.loads(run_python("import json\n" + code, GPUCOLL_CPU_ONLY="0"))


def header():
    assert FOLDER is not None
    return (FOLDER / "include/nccl.h").read_text(encoding="utf-8")


def test_it_loads_with_every_function_of_the_table():
    path, reason, version, absent, code = in_new_process("""
from gpucoll.backends.nccl import library
found = library.load("nccl")
version = sum(n * scale for n, scale in zip(found.version, (10000, 100, 1)))
print(json.dumps([found.path, found.reason, found.version_text, found.absent, version]))
""")
    assert path == f"{FOLDER}/lib/libnccl.so.2"
    assert reason == "the wheel on Python's path"
    assert re.fullmatch(r"2\.\d+\.\d+", version)
    assert f"#define NCCL_VERSION_CODE {code}\n" in header()
    since = {row.name: row.since for row in NCCL.prototypes}
    assert all(since[name] for name in absent)
    if code >= 22900:
        assert absent == []


def test_its_words_for_each_code():
    texts = in_new_process("""
from gpucoll.backends.nccl import library
found = library.load("nccl")
errors = [found.error(code, "ncclAllReduce") for code in range(1, 8)]
print(json.dumps([[type(error).__name__, str(error)] for error in errors]))
""")
    kinds = [kind for kind, _ in texts]
    assert kinds == ["BackendError"] * 5 + ["PeerLostError", "BackendError"]
    for word, (_, text) in zip(
        ("cuda", "system", "internal", "argument", "usage", "remote", "progress"),
        texts,
        strict=True,
    ):
        assert word in text


def test_its_last_error_is_told():
    kind, message = in_new_process("""
from gpucoll.backends.nccl import library
found = library.load("nccl")
code = found.functions.ncclAllReduce(None, None, 1, 7, 0, None, None)
error = found.error(code, "ncclAllReduce")
print(json.dumps([type(error).__name__, str(error)]))
""")
    assert kind == "BackendError"
    assert "AllReduce : comm argument is NULL (code 4 of NCCL 2." in message


@pytest.mark.skipif(devices.device_count("cuda") > 0, reason="there is a GPU")
@pytest.mark.parametrize("is_blocking", [True, False])
def test_without_a_gpu_it_says_so(is_blocking):
    code, message = in_new_process(f"""
import ctypes
from gpucoll.backends.nccl import library
from gpucoll.backends.nccl.prototypes import configuration, ncclUniqueId
found = library.load("nccl")
made, unique_id = ctypes.c_void_p(), ncclUniqueId.from_buffer_copy(found.unique_id())
options = configuration(is_blocking={is_blocking})
arguments = ctypes.byref(made), 1, unique_id, 0, ctypes.byref(options)
code = found.functions.ncclCommInitRankConfig(*arguments)
print(json.dumps([code, str(found.unavailable(code, "ncclCommInitRankConfig"))]))
""")
    assert code == 1
    assert "CUDA driver version is insufficient" in message
    assert "the CUDA driver cannot be loaded: libcuda.so.1" in message


@pytest.mark.parametrize(
    "enumeration",
    [prototypes.ncclResult_t, prototypes.ncclDataType_t, prototypes.ncclRedOp_t],
    ids=lambda item: item.__name__,
)
def test_numbers_are_those_of_its_header(enumeration):
    text = header()
    for member in enumeration:
        if member.name == "ncclTimeout" and member.name not in text:
            continue  # 2.29 has it not yet
        assert re.search(rf"\b{member.name}\s*=\s*{member.value}\b", text), member


@pytest.mark.parametrize("name", ["NCCL_WIN_COLL_SYMMETRIC", "NCCL_WIN_REQUIRED_ALIGNMENT"])
def test_constants_are_those_of_its_header(name):
    found = re.search(rf"#define {name} (\w+)", header())
    assert found is not None
    assert int(found[1], 0) == getattr(prototypes, name)


def kind_of(declared):
    """Return the ctypes type that a parameter's declaration stands for, pointers all alike."""
    if "*" in declared or re.search(r"nccl(Comm|Window)_t|cudaStream_t", declared):
        return ctypes.c_void_p
    if "ncclUniqueId" in declared:
        return prototypes.ncclUniqueId
    return ctypes.c_size_t if "size_t" in declared else ctypes.c_int


def test_arguments_are_those_of_its_header():
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header(), flags=re.DOTALL)
    for row in prototypes.PROTOTYPES:
        found = re.search(rf"([\w* ]+?)\b{row.name}\s*\(([^)]*)\)\s*;", text)
        assert found is not None, row.name
        declared = [kind_of(part) for part in found[2].split(",") if part.strip()]
        ours = [
            ctypes.c_void_p if hasattr(kind, "contents") or kind is ctypes.c_char_p else kind
            for kind in row.arguments
        ]
        assert ours == declared, row.name
        assert row.result is (ctypes.c_char_p if "char" in found[1] else ctypes.c_int), row.name


def test_the_configuration_is_the_beginning_of_its_own():
    text = re.search(r"typedef struct ncclConfig_v\d+ \{(.*?)\} ncclConfig_t;", header(), re.DOTALL)
    assert text is not None
    fields = re.findall(r"(\w+);", text[1])
    ours = [name for name, *_ in prototypes.ncclConfig_t._fields_]
    assert fields[: len(ours)] == ours
