"""Machine code in the package: which processors and interpreters it fits, and that it is loaded."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from gpucoll import config
from gpucoll.backends.precompile import MODULES_BETWEEN_HOSTS
from gpucoll.kernels.cpu import cache, cache_key, kernel_files, levels, linking, packaged

DIGEST = "0123456789abcdef"
V2, V3, V4, ARM = levels.LEVELS


@pytest.fixture(autouse=True)
def anew(monkeypatch):
    """Let each test look again, and forget what it found."""
    monkeypatch.delenv(config.COMPILE, raising=False)
    packaged.fit.cache_clear()
    packaged.library.cache_clear()
    yield
    packaged.fit.cache_clear()
    packaged.library.cache_clear()


def processor(machine, *features):
    name = "Features" if machine == "aarch64" else "flags"
    return f"{machine}\nmodel name=A flags=no\n{name}={' '.join(sorted(features))}"


class TestLevels:
    @pytest.mark.parametrize(
        ("features", "names"),
        [
            (V4.needs | {"amx_tile"}, ["x86-64-v4", "x86-64-v3", "x86-64-v2"]),
            (V4.needs - {"avx512vl"}, ["x86-64-v3", "x86-64-v2"]),
            (V3.needs - {"fma"}, ["x86-64-v2"]),
            (V2.needs - {"popcnt"}, []),
            (frozenset(), []),
        ],
    )
    def test_of_x86(self, features, names):
        found = levels.levels_here(processor("x86_64", *features))
        assert [level.name for level in found] == names

    def test_of_others(self):
        assert levels.levels_here(processor("aarch64", "fp", "asimd", "sve")) == [ARM]
        assert levels.levels_here(processor("aarch64", *V4.needs)) == []
        assert levels.levels_here(processor("riscv64", *V4.needs)) == []

    def test_without_proc(self):
        assert levels.levels_here("x86_64") == []

    @pytest.mark.parametrize("level", levels.LEVELS, ids=lambda level: level.name)
    def test_llvm_knows_them(self, level):
        """It would warn of an unknown name, and make code for the oldest processors."""
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        code = (
            "import llvmlite.binding as llvm\n"
            "llvm.initialize_all_targets(); llvm.initialize_all_asmprinters()\n"
            f"made = llvm.Target.from_triple('{level.machine}-unknown-linux-gnu')"
            f".create_target_machine(cpu={level.llvm_name!r}, features={level.llvm_features!r})\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, b"")


def put(folder: Path, level: str, digest: str = DIGEST, parts: int = packaged.N_PARTS) -> None:
    folder.mkdir(exist_ok=True)
    for part in range(parts):
        kernel_files.keep_content(folder / packaged.file_name(level, part, digest), b"a library")


class TestFit:
    ALL = ("x86-64-v4", "x86-64-v3", "x86-64-v2")

    def test_the_best_that_the_processor_runs(self, tmp_path):
        for level in ("x86-64-v2", "x86-64-v4", "x86-64-v3"):
            put(tmp_path, level)
        for place, level in enumerate(self.ALL):
            found = packaged.look(tmp_path, DIGEST, [*self.ALL[place:]])
            assert (found.level, found.problem) == (level, "")
            assert [file.name.partition(DIGEST)[0] for file in found.files] == [
                f"{level}-{part}-" for part in range(packaged.N_PARTS)
            ]

    def test_a_lower_level_where_the_best_is_missing(self, tmp_path):
        put(tmp_path, "x86-64-v2")
        assert packaged.look(tmp_path, DIGEST, [*self.ALL]).level == "x86-64-v2"

    def refused(self, folder, digest=DIGEST, names=ALL):
        found = packaged.look(folder, digest, [*names])
        assert (found.level, found.files, found.is_refused) == ("", (), True)
        return found.problem

    def test_another_processor(self, tmp_path):
        put(tmp_path, "x86-64-v4")
        put(tmp_path, "x86-64-v3")
        assert self.refused(tmp_path, names=["x86-64-v2"]) == (
            "it is for x86-64-v3, x86-64-v4; this processor reaches x86-64-v2"
        )
        assert self.refused(tmp_path, names=[]).endswith("; this processor reaches no level")

    def test_other_sources(self, tmp_path):
        put(tmp_path, "x86-64-v4")
        said = "it was made of other sources, or for another page size"
        assert self.refused(tmp_path, digest=DIGEST[::-1]) == said

    def test_another_interpreter(self, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            patch.setattr(packaged, "_SUFFIX", ".cpython-399t-x86_64-linux-gnu.so")
            put(tmp_path, "x86-64-v4")
        assert self.refused(tmp_path) == (
            "it is for .cpython-399t-x86_64-linux-gnu.so, and this interpreter loads "
            f"*{packaged._SUFFIX}"
        )

    @pytest.mark.parametrize("damage", ["cut", "empty", "gone"])
    def test_damage(self, tmp_path, damage):
        put(tmp_path, "x86-64-v4")
        file = tmp_path / packaged.file_name("x86-64-v4", 1, DIGEST)
        if damage == "gone":
            file.unlink()
            assert self.refused(tmp_path) == f"{file}: No such file or directory"
        else:
            file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else b"")
            assert self.refused(tmp_path) == f"{file} is damaged"
        put(tmp_path, "x86-64-v3")
        assert packaged.look(tmp_path, DIGEST, [*self.ALL]).level == "x86-64-v3"

    def test_a_package_without_it(self, tmp_path):
        nothing = packaged.Fit("", problem="the package has none")
        assert packaged.look(tmp_path / "none", DIGEST, [*self.ALL]) == nothing
        (tmp_path / "notes.txt").touch()
        assert packaged.look(tmp_path, DIGEST, [*self.ALL]) == nothing
        (tmp_path / "not_made.txt").write_text("the build made none: why\n")
        found = packaged.look(tmp_path, DIGEST, [*self.ALL])
        assert found == packaged.Fit("", problem="the build made none: why")

    def test_who_wants_other_code(self, tmp_path, monkeypatch):
        monkeypatch.setattr(packaged, "FOLDER", tmp_path)
        put(tmp_path, levels.levels_here()[0].name, cache_key.packaged_digest())
        assert packaged.fit().files
        packaged.fit.cache_clear()
        monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
        assert packaged.fit().problem == "NUMBA_BOUNDSCHECK=1 asks for other code"
        packaged.fit.cache_clear()
        monkeypatch.setenv(config.COMPILE, "1")
        assert packaged.fit() == packaged.Fit("", problem="GPUCOLL_COMPILE is set")


def test_the_digest_is_of_all_that_gets_into_it(monkeypatch):
    usual, counted = cache_key.packaged_digest(), cache_key._source_files(("transport/tcp",))
    for module in MODULES_BETWEEN_HOSTS:
        name = f"{module.removeprefix('gpucoll.').replace('.', '/')}.py"
        assert name in dict(cache_key._source_files(cache_key._FURTHER_PACKAGED))
        assert name not in dict(cache_key._source_files())
    assert len(counted) > len(cache_key._source_files())
    monkeypatch.setattr("mmap.PAGESIZE", 65536)  # a constant in the loops of the heap
    assert cache_key.packaged_digest() != usual


class TestLoading:
    """Libraries of one function each, as if they had come with the package."""

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setattr(packaged, "FOLDER", tmp_path / "machine_code")
        (tmp_path / "machine_code").mkdir()
        for part in range(packaged.N_PARTS):
            code = f"define i64 @of_part_{part}() {{ ret i64 {part} }}"
            self.put(part, self.library(code))
        return tmp_path / "machine_code"

    def library(self, code):
        module = llvm.parse_assembly(code)
        machine = linking.target_of_numba()
        module.triple = machine.triple
        return linking.emit(module, machine, ())

    def put(self, part, content):
        level = levels.levels_here()[0].name
        name = packaged.file_name(level, part, cache_key.packaged_digest())
        kernel_files.keep_content(packaged.FOLDER / name, content)

    def test_it_goes_before_the_cache(self, folder, tmp_path, monkeypatch):
        monkeypatch.setenv(config.CACHE_DIR, str(tmp_path / "cache"))
        assert cache.is_complete()
        found = cache.library()
        assert found is not None
        for part in range(packaged.N_PARTS):
            address = found.address(f"of_part_{part}")
            assert address is not None
            assert ctypes.CFUNCTYPE(ctypes.c_int64)(address)() == part
        assert found.address("of_part_9") is None
        assert packaged.problem() == ""
        assert not (tmp_path / "cache").exists()

    def test_what_cannot_be_loaded(self, folder):
        self.put(1, b"no library")
        assert packaged.library() is None
        assert packaged.problem() == "the dynamic linker refuses it"
