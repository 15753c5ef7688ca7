"""The link tree shows the one package, follows the sources, and deletes nothing but its links."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(place: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools/link_tree.py"), str(place)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_tree_holds_the_whole_package(tmp_path: Path):
    assert run(tmp_path).returncode == 0

    linked = tmp_path / "gpucoll"
    for name in ("kernels", "backends", "bench"):
        assert (linked / name).resolve() == ROOT / name
    for source in (ROOT / "src/gpucoll").iterdir():
        if source.name != "__pycache__":
            assert (linked / source.name).resolve() == source


def test_second_run_changes_nothing(tmp_path: Path):
    run(tmp_path)

    assert run(tmp_path).stdout.splitlines() == [f"put on the path: {tmp_path.resolve()}"]


def test_links_to_what_is_gone_are_removed(tmp_path: Path):
    run(tmp_path)
    stale = tmp_path / "gpucoll/gone.py"
    stale.symlink_to(ROOT / "src/gpucoll/gone.py")

    assert "removed gone.py" in run(tmp_path).stdout
    assert not stale.is_symlink()


@pytest.mark.parametrize("name", ["errors.py", "notes.txt"])
def test_a_real_file_is_refused_and_kept(tmp_path: Path, name: str):
    (tmp_path / "gpucoll").mkdir()
    mine = tmp_path / "gpucoll" / name
    mine.write_text("mine")

    assert run(tmp_path).returncode != 0
    assert mine.read_text() == "mine"
