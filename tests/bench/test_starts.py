"""The environment of the bench's own ranks: the same gpucoll, and the user's path."""

from __future__ import annotations

import os
import site
from pathlib import Path

import pytest

import gpucoll
from gpucoll.bench.starts import own_environment

PLACE = str(Path(gpucoll.__file__).parent.parent)


@pytest.mark.parametrize("given", ["/a/path:/another", None])
@pytest.mark.parametrize("is_installed", [True, False])
def test_the_users_path_comes_before_an_installed_gpucoll(monkeypatch, is_installed, given):
    monkeypatch.setattr(site, "getsitepackages", lambda: [PLACE] if is_installed else ["/other"])
    monkeypatch.setattr(site, "getusersitepackages", lambda: "/none")
    if given is None:
        monkeypatch.delenv("PYTHONPATH", raising=False)
    else:
        monkeypatch.setenv("PYTHONPATH", given)
    found = own_environment().get("PYTHONPATH")
    added = [] if is_installed else [PLACE]
    assert (found.split(os.pathsep) if found else []) == added + (given.split(":") if given else [])
