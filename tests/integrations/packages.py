"""Packages of others for tests, fetched where there is a network or a cache of pip's."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

FETCH_S = 60


def fetched(folder: Path, *requirements: str) -> Path:
    """Return where packages were installed, and nothing else; skip where they cannot be had."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    _run([*command, *requirements], requirements[0])
    return folder


def source_of(requirement: str, folder: Path) -> Path:
    """Return a package's unpacked sources; skip where they cannot be had."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary"]
    name = requirement.partition("=")[0]
    _run([*command, name, "-d", str(folder), requirement], requirement)
    (archive,) = folder.glob(f"{name}*.tar.gz")
    with tarfile.open(archive) as packed:
        if hasattr(tarfile, "data_filter"):
            packed.extractall(folder, filter="data")
        else:  # Python 3.11.2, which Debian 12 has
            packed.extractall(folder)
    return archive.with_suffix("").with_suffix("")


def repository_of(address: str, tag: str, folder: Path) -> Path:
    """Return a clone of a repository at a tag; skip where it cannot be had."""
    clone = ["git", "clone", "-q", "--depth", "1", "--branch", tag, address, str(folder / "clone")]
    _run(clone, f"{address} {tag}")
    return folder / "clone"


def _run(command: list[str], requirement: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except FileNotFoundError as error:
        pytest.skip(f"{requirement} cannot be fetched: {error}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{requirement} could not be fetched within {FETCH_S} s")
    if done.returncode:
        pytest.skip(f"{requirement} cannot be fetched: {done.stderr.strip()[-300:]}")
