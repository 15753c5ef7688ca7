"""A file of the user's that has the name of a package that gpucoll stands on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

USES = {"init": "gpucoll.init()", "launch": "gpucoll.launch(lambda comm: 1)"}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", ["numpy", "numba", "cloudpickle"])
def test_a_file_beside_the_script(tmp_path, name, use):
    (tmp_path / f"{name}.py").write_text("")
    (tmp_path / "train.py").write_text(f"import gpucoll\n{USES[use]}\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "GPUCOLL_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    said = (
        f"`import {name}` finds {tmp_path / name}.py, which hides it: give that file another name"
    )
    assert last.startswith("gpucoll.errors.BackendUnavailableError: gpucoll needs the package")
    assert last.endswith(said)
    assert not (tmp_path / "cache").exists()  # nothing was compiled
