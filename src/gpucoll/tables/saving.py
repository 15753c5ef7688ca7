"""A table in a folder: its rows, what is kept beside them, and its clock.

Each rank writes a share of the rows of its host, as files of NumPy's format: the ids, the rows, and
the sums of Adagrad. At last rank 0 puts the manifest, which names the files, in the place of the
one before. So a save that is cut short leaves what was saved before.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gpucoll.api.agreement import agree
from gpucoll.errors import ArgumentError
from gpucoll.wording import rank_of

if TYPE_CHECKING:
    from gpucoll.api.communicator import Communicator
    from gpucoll.tables.owners import Owners
    from gpucoll.tables.rows import Rows

__all__ = ["MANIFEST", "check", "read_manifest", "read_rows", "write"]

AnyArray: TypeAlias = npt.NDArray[Any]

MANIFEST = "table.json"
_FORMAT = 1
_PATTERN = "part-*.npy"
_BYTES_AT_ONCE = 16 << 20


def write(
    comm: Communicator, folder: str | os.PathLike[str], owners: Owners, rows: Rows, facts: Any
) -> None:
    """Save a table that nobody changes meanwhile. Collective.

    Parameters
    ----------
    folder : path
        On a file system that all hosts share; it is made if it is not there.
    facts : dict
        What the manifest says of the table, beside its files.

    Raises
    ------
    OSError
        On a rank that could not write; the others raise ArgumentError. What was saved before is
        still there.
    """
    place, token = Path(folder), os.urandom(6).hex()
    token = comm.broadcast_object(token, root=0)
    ranks = rows.memory.ranks
    share, count = ranks.index(comm.rank), rows.count
    here = slice(count * share // len(ranks), count * (share + 1) // len(ranks))
    part: dict[str, Any] = {"count": here.stop - here.start}

    def write_part() -> None:
        place.mkdir(parents=True, exist_ok=True)
        arrays = {"ids": owners.owned_by(owners.here), "rows": rows.values, "sums": rows.sums}
        for name, array in arrays.items():
            if array is not None:
                part[name] = f"part-{token}-{comm.rank}-{name}.npy"
                with _synced(place / part[name]) as file:
                    np.save(file, _plain(array[here]), allow_pickle=False)

    parts = agree(comm, "Table.save", _tried(write_part), {}, part)

    def write_manifest() -> None:
        files = {part[name] for part in parts for name in ("ids", "rows", "sums") if name in part}
        beside = place / f"{MANIFEST}.{token}"
        with _synced(beside) as file:
            file.write(json.dumps({"format": _FORMAT, **facts, "parts": parts}, indent=1).encode())
        _sync_folder(place)  # the files' names before the manifest's
        beside.replace(place / MANIFEST)
        _sync_folder(place)
        for left in [*place.glob(_PATTERN), *place.glob(f"{MANIFEST}.*")]:
            if left.name not in files:
                left.unlink(missing_ok=True)

    problem = _tried(write_manifest) if comm.rank == 0 else None
    agree(comm, "Table.save", problem, {}, None)


def read_manifest(comm: Communicator, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what the manifest says, as rank 0 has read it. Collective."""
    found: list[dict[str, Any]] = []

    def read() -> None:
        path = Path(folder) / MANIFEST
        if not path.exists():
            raise ArgumentError(
                f"{_who(comm)}: {folder} has no saved table: there is no {MANIFEST}"
            )
        manifest = json.loads(path.read_bytes())
        if manifest.get("format") != _FORMAT:
            raise ArgumentError(
                f"{_who(comm)}: {path} has format {manifest.get('format')}; this version of "
                f"gpucoll reads {_FORMAT}"
            )
        found.append(manifest)

    problem = _tried(read) if comm.rank == 0 else None
    manifest = agree(comm, "Table.load", problem, {}, found[0] if found else None)[0]
    assert manifest is not None
    return manifest


def check(settings: dict[str, str], manifest: dict[str, Any], where: str) -> None:
    """Raise unless a table was saved with these settings, maybe with other numbers in its update.

    Parameters
    ----------
    settings : dict
        What `Setup.settings` returns.
    """
    for name in ("rows", "width", "dtype", "update"):
        saved, given = str(manifest[name]), settings[name]
        if saved != given and (name != "update" or _kind(saved) != _kind(given)):
            raise ArgumentError(f"{where} has a table saved with {name} {saved}; got {given}")


def _kind(update: str) -> str:
    return update.partition("(")[0]


def read_rows(
    comm: Communicator,
    folder: str | os.PathLike[str],
    manifest: dict[str, Any],
    owners: Owners,
    rows: Rows,
) -> None:
    """Read the rows of this host, of which each of its ranks reads a share. Collective."""
    step = max(1, _BYTES_AT_ONCE // max(1, rows.values[:1].nbytes))
    share, ranks = rows.memory.ranks.index(comm.rank), len(rows.memory.ranks)

    def read() -> None:
        total = sum(part["count"] for part in manifest["parts"])
        if total != owners.rows:
            raise ArgumentError(f"{folder} has {total} rows in files, of {owners.rows}")
        chunk = 0
        for part in manifest["parts"]:
            shape = part["count"], rows.width
            ids = _opened(folder, part["ids"], shape[:1], np.dtype(np.int64))
            pairs = [(rows.values, _opened(folder, part["rows"], shape, rows.dtype))]
            if rows.sums is not None:
                pairs.append((rows.sums, _opened(folder, part["sums"], shape, rows.sums.dtype)))
            for begin in range(0, part["count"], step):
                chunk += 1
                if chunk % ranks == share:
                    split = owners.split(np.array(ids[begin : begin + step]))
                    here = split.part(owners.here)
                    for destination, saved in pairs:
                        found = saved[begin : begin + step][split.order[here]]
                        destination[split.places[here]] = found

    agree(comm, "Table.load", _tried(read), {}, None)


def _opened(
    folder: str | os.PathLike[str], name: str, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> AnyArray:
    """Return an array of a file, which is read when it is used."""
    path = Path(folder) / name
    if not path.exists():
        raise ArgumentError(
            f"{path} is not there: the folder must be on a file system that all hosts share"
        )
    array: AnyArray = np.load(path, mmap_mode="r" if shape[0] else None, allow_pickle=False)
    if array.shape != shape or array.dtype.itemsize != dtype.itemsize:
        raise ArgumentError(f"{path} has {array.dtype} of shape {array.shape}, not {dtype} {shape}")
    return array.view(dtype)


def _plain(array: AnyArray) -> AnyArray:
    """Return a view of a dtype that NumPy's format knows: those of ml_dtypes travel as bytes."""
    dtype = array.dtype
    return array if dtype.isbuiltin == 1 else array.view(np.dtype((np.void, dtype.itemsize)))


@contextlib.contextmanager
def _synced(path: Path) -> Iterator[Any]:
    """Open a new file; when it is closed it is on the disk."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tried(function: Callable[[], None]) -> Exception | None:
    try:
        function()
    except Exception as error:
        return error
    return None


def _who(comm: Communicator) -> str:
    return rank_of(comm.rank, comm.world_size)
