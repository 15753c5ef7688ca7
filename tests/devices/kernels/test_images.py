"""Compiled kernels on disk: kept and found again, made by one process, never taken from others."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.doubles import run_python

from gpucoll import config
from gpucoll.devices.kernels import images
from gpucoll.devices.kernels.compiler import compiler_of
from gpucoll.devices.kernels.images import compile_group, image_of
from gpucoll.errors import BackendUnavailableError
from gpucoll.kernels.cpu.loop_files import FolderLock
from gpucoll.kernels.gpu.catalogue import group_of
from gpucoll.kernels.gpu.reduce import reduce_kernel

KERNEL, OTHER = (reduce_kernel("sum", dtype)[0] for dtype in ("float32", "float64"))


@contextmanager
def kept_in(folder: Path):
    """Have this process keep its kernels in a folder."""
    with pytest.MonkeyPatch.context() as patch:
        folder.mkdir(mode=0o700, exist_ok=True)
        patch.setattr(images, "folder", lambda: folder)
        yield patch


def twice(device, control, folder):
    with kept_in(folder):
        before = control.compilations
        first, second = image_of(KERNEL, device.target), image_of(KERNEL, device.target)
        compiled = control.compilations - before
        other = image_of(OTHER, device.target)
    assert first == second
    assert other.content != first.content
    return compiled, sorted(path.name for path in folder.iterdir())


@pytest.mark.soak(quick=1)
def test_kept(on_device, tmp_path, double):
    compiled, names = on_device(twice, tmp_path / "kernels")
    assert compiled == 1
    target = "sm_99" if double.kind == "cuda" else "gfx9ff_sramecc__xnack_"
    compiler = "nvrtc-12." if double.kind == "cuda" else "hiprtc-6."
    assert len(names) == 2  # and no locks
    for name in names:
        assert name.startswith(f"reduce-{target}-")
        assert f".{compiler}" in name
        assert name.endswith(".image")


def spoilt(device, control, folder, how):
    with kept_in(folder):
        whole = image_of(KERNEL, device.target)
        (path,) = folder.iterdir()
        data = path.read_bytes()
        if how == "cut":
            path.write_bytes(data[: len(data) // 2])
        elif how == "changed":
            path.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "writable":
            path.chmod(0o666)
        elif how == "link":
            elsewhere = folder.with_name("elsewhere")
            path.rename(elsewhere)
            path.symlink_to(elsewhere)
        elif how == "pipe":
            path.unlink()
            os.mkfifo(path)
        before = control.compilations
        again = image_of(KERNEL, device.target)
        compiled = control.compilations - before
        assert len(again.content) == len(whole.content)
        assert images.kept(path.name.removesuffix(".image")) == again.content
        assert path.is_file()
        return compiled


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("how", ["cut", "changed", "empty", "writable", "link", "pipe"])
def test_what_is_not_as_it_was_written_is_made_anew(on_device, tmp_path, how):
    assert on_device(spoilt, tmp_path / "kernels", how) == 1


def ahead(device, control, folder):
    with kept_in(folder) as patch:
        compile_group(group_of(KERNEL), device.target)
        before = control.compilations
        found = image_of(KERNEL, device.target)
        compiled = control.compilations - before

        def none(*_):
            raise BackendUnavailableError("there is no compiler")

        patch.setattr(images, "compiler_of", none)
        without = image_of(KERNEL, device.target)
        with pytest.raises(BackendUnavailableError, match="there is no compiler"):
            image_of(KERNEL, "sm_42" if device.kind == "cuda" else "gfx42")
    assert KERNEL in found.kernels
    assert len(found.kernels) > 1
    assert without == found._replace(origin="kept")
    return compiled


@pytest.mark.soak
def test_compiled_ahead(on_device, tmp_path):
    assert on_device(ahead, tmp_path / "kernels") == 0


def for_all_modes(device, control, folder):
    with kept_in(folder):
        compile_group(group_of(KERNEL), "gfx9ff")
        before = control.compilations
        image_of(KERNEL, "gfx9ff:sramecc+:xnack-")
        return control.compilations - before


@pytest.mark.soak(quick=1)
def test_what_was_compiled_for_all_modes_serves_each(on_device, double, tmp_path):
    if double.kind == "cuda":
        pytest.skip("modes are AMD's")
    assert on_device(for_all_modes, tmp_path / "kernels") == 0


def edited(device, control, folder):
    with kept_in(folder) as patch:
        before = control.compilations
        image_of(KERNEL, device.target)
        patch.setattr(images, "source_of", lambda kernels: "int x;")
        images._name.cache_clear()
        changed = image_of(KERNEL, device.target)
        images._name.cache_clear()
        return control.compilations - before, len(changed.kernels), len(list(folder.iterdir()))


def test_another_source_is_another_kernel(on_device, tmp_path):
    assert on_device(edited, tmp_path / "kernels") == (2, 1, 2)


def not_kept(device, control, folder):
    with kept_in(folder) as patch:
        patch.setattr(images, "folder", lambda: None)
        first = image_of(KERNEL, device.target).content
        patch.setattr(images, "folder", lambda: folder / "gone")
        second = image_of(KERNEL, device.target).content
    return len(first) == len(second), list(folder.iterdir())


@pytest.mark.soak(quick=1)
def test_without_a_folder_it_is_compiled_all_the_same(on_device, tmp_path):
    assert on_device(not_kept, tmp_path / "kernels") == (True, [])


def held_by_another(device, control, folder):
    with kept_in(folder) as patch:
        name = f"{images._name((KERNEL,), device.target)}.{compiler_of(device.kind).identity}"
        with FolderLock(folder / f"{name}.image") as lock:
            lock.take(alone=True)
            patch.setattr(images, "WAIT_S", 0.01)
            return len(image_of(KERNEL, device.target).content) > 0


def test_one_that_compiles_for_ever_is_not_waited_for(on_device, tmp_path):
    assert on_device(held_by_another, tmp_path / "kernels")


def at_once(_seat, double, folder):
    control = double.load()
    target = "sm_99" if double.kind == "cuda" else "gfx9ff"
    with kept_in(folder), ThreadPoolExecutor(3) as pool:
        before = control.compilations
        made = list(pool.map(lambda _: image_of(KERNEL, target).content, range(3)))
        assert len(set(made)) == 1
        return control.compilations - before, made[0]


def test_many_at_once_compile_once(gpu_ranks, double, tmp_path):
    answers = gpu_ranks.call(
        4, at_once, double, tmp_path / "kernels", gives="seat", environment=double.variables
    )
    assert sum(compiled for compiled, _ in answers) == 1
    assert len({content for _, content in answers}) == 1
    assert [path.suffix for path in (tmp_path / "kernels").iterdir()] == [".image"]


def old_ones(device, control, folder):
    with kept_in(folder):
        for name, days in (("old.image", 100), (".new-123", 100), ("young.image", 1)):
            path = folder / name
            path.touch()
            then = path.stat().st_mtime - days * 86400
            os.utime(path, (then, then))
        image_of(KERNEL, device.target)
        return sorted(path.name for path in folder.iterdir())


def test_what_nobody_uses_any_more_goes(on_device, tmp_path):
    names = on_device(old_ones, tmp_path / "kernels")
    assert len(names) == 2
    assert "young.image" in names


PROGRAM = """
from gpucoll.devices.kernels import images
try:
    print(images.folder())
except Exception as error:
    print(type(error).__name__, error)
"""


def test_the_folder_is_beside_the_cpu_kernels(tmp_path):
    folder = tmp_path / "cache"
    found = run_python(PROGRAM, **{config.CACHE_DIR: str(folder)})
    assert found.strip() == str(folder / "gpu-kernels")
    assert (folder / "gpu-kernels").stat().st_mode & 0o777 == 0o700


def test_nothing_is_taken_from_where_others_can_write(tmp_path):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    found = run_python(PROGRAM, **{config.CACHE_DIR: str(folder)})
    assert found.startswith("ArgumentError ")
    assert "can be written to by other users" in found
    folder.chmod(0o700)
    (folder / "gpu-kernels").mkdir()
    (folder / "gpu-kernels").chmod(0o777)
    assert run_python(PROGRAM, **{config.CACHE_DIR: str(folder)}).strip() == "None"
