"""Tables in folders: loaded on other ranks and hosts, through saves that are cut short."""

from __future__ import annotations

import json
import os
import re
import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.shrinking import results

from gpucoll.errors import ArgumentError, PeerLostError
from gpucoll.tables import SGD, Adagrad, Staleness, Table, saving

ROWS, WIDTH = 300, 4
IDS = np.arange(ROWS)
REFUSALS = [
    "rows 300; got 301",
    "width 4; got 3",
    "dtype float32; got float64",
    "update Adagrad.*; got SGD",
    "update Adagrad.*; got sum",
    "no saved table",
]


def saved(comm, folder):
    """Save a table at clock 2; return its rows, and what they are after one more push."""
    with Table(comm, ROWS, WIDTH, init=0.5, update="adagrad", mode="sync") as table:
        if comm.rank == 0:
            table.push(IDS, np.tile(IDS[:, None] - 9, WIDTH).astype(np.float32))
        table.clock()
        table.clock()
        table.save(folder)
        return table.snapshot(), one_more_push(comm, table)


def one_more_push(comm, table):
    if comm.rank == 0:
        table.push(IDS, np.ones((ROWS, WIDTH), np.float32))
    table.clock()
    comm.barrier()
    return table.snapshot()


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize(
    ("before", "after"), [("aab", "a"), ("a", "ab"), ("ab", "abc"), ("abc", "aab"), ("aa", "aaa")]
)
@pytest.mark.parametrize("mode", ["sync", "async", Staleness(1)], ids=str)
def test_loaded_elsewhere(hosts, tmp_path, before, after, mode):
    def loaded(comm):
        with Table.load(comm, tmp_path, ROWS, WIDTH, update="adagrad", mode=mode) as table:
            found = table.snapshot()
            comm.barrier()
            more = one_more_push(comm, table)
            assert table.clock() == 4
            return found, more

    expected = hosts.call(before, saved, tmp_path)[0]
    for found in hosts.call(after, loaded):
        for got, wanted in zip(found, expected, strict=True):
            assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float16", "complex64", "bool"])
def test_dtypes(hosts, tmp_path, dtype):
    def on_each(comm):
        import ml_dtypes

        values = (np.arange(30).reshape(10, 3) % 2).astype(getattr(ml_dtypes, dtype, dtype))
        with Table(comm, 10, 3, dtype, init=values) as table:
            table.save(tmp_path)
        with Table.load(comm, tmp_path, dtype=dtype) as table:
            assert table.dtype == values.dtype
            assert (table.snapshot() == values).all()

    hosts.call("ab", on_each)


def test_what_does_not_fit_is_refused_on_all_ranks(hosts, tmp_path):
    def on_each(comm):
        saved(comm, tmp_path)
        found = []
        cases: list[tuple[Any, ...]] = [
            ((tmp_path, ROWS + 1), {"update": "adagrad"}),
            ((tmp_path, ROWS, 3), {"update": "adagrad"}),
            ((tmp_path, ROWS, WIDTH, "float64"), {"update": "adagrad"}),
            ((tmp_path,), {"update": "sgd"}),
            ((tmp_path,), {}),
            ((tmp_path / "elsewhere",), {}),
        ]
        for given, how in cases:
            with pytest.raises(ArgumentError) as error:
                Table.load(comm, *given, **how)
            found.append(str(error.value))
        with Table.load(comm, tmp_path, update=Adagrad(0.5)) as table:
            assert table.width == WIDTH
        comm.barrier()
        if comm.rank == 0:
            (path,) = tmp_path.glob("part-*-1-rows.npy")
            path.unlink()
        comm.barrier()
        with pytest.raises(ArgumentError, match="must be on a file system that all hosts share"):
            Table.load(comm, tmp_path, update="adagrad")
        return found

    first, second = hosts.call("ab", on_each)

    for found in (first, second):
        for text, words in zip(found, REFUSALS, strict=True):
            assert re.search(words, text)


def test_a_save_that_is_cut_short_leaves_the_one_before(hosts, rank_server, tmp_path):
    def cut_short(comm, module, name):
        with Table(comm, ROWS, WIDTH, init=7, update="adagrad") as table:
            if comm.rank == 1:

                def die(*_, **__):
                    os.kill(os.getpid(), signal.SIGKILL)

                with mock.patch.object(module, name, die):
                    table.save(tmp_path)
            with pytest.raises(PeerLostError):
                table.save(tmp_path)

    def loaded(comm):
        with Table.load(comm, tmp_path, update="adagrad") as table:
            found = table.snapshot()
            table.save(tmp_path)
        return found

    expected = hosts.call("ab", saved, tmp_path)[0][0]
    for moment in ((np, "save"), (os, "fsync")):
        with rank_server.fork(2) as pool:
            hosts.start(pool, "ab", cut_short, *moment)
            results(pool.collect(), [1])
        assert len(list(tmp_path.glob("part-*"))) > 6
        for found in hosts.call("ab", loaded):
            assert (found == expected).all()
        assert len(list(tmp_path.iterdir())) == 7  # three of each rank, and the manifest


def test_a_folder_that_cannot_be_written(hosts, tmp_path):
    (tmp_path / "file").write_text("")

    def on_each(comm):
        with Table(comm, ROWS, WIDTH) as table:
            with pytest.raises(OSError, match="Not a directory"):
                table.save(tmp_path / "file" / "folder")
            table.save(tmp_path / "folder")

            def fail(*_):
                raise OSError("no space left")

            if comm.rank == 0:
                patched = mock.patch.object(saving, "_sync_folder", fail)
                with patched, pytest.raises(OSError, match="no space left"):
                    table.save(tmp_path / "folder")
            else:
                with pytest.raises(ArgumentError, match="rank 0 of 2 raised: no space left"):
                    table.save(tmp_path / "folder")
        manifest = json.loads((tmp_path / "folder" / saving.MANIFEST).read_text())
        return [part["count"] for part in manifest["parts"]]

    assert {sum(counts) for counts in hosts.call("ab", on_each)} == {ROWS}


def test_lost_rows_of_a_loaded_table_begin_with_init(hosts, rank_server, tmp_path):
    def on_each(comm):
        with Table(comm, ROWS, WIDTH, "int64", init=1) as table:
            table.save(tmp_path)
        table = Table.load(comm, tmp_path, init=2)
        assert (table.snapshot() == 1).all()
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        with table.kept_for(comm.shrink()) as kept:
            found = kept.snapshot()
            assert (found[kept.lost_rows] == 2).all()
            return len(kept.lost_rows), int((found == 1).all(1).sum())

    with rank_server.fork(3) as pool:
        hosts.start(pool, "abc", on_each)
        for lost, left in results(pool.collect(), [2]):
            assert lost + left == ROWS
            assert lost > 50


@pytest.mark.ranks(1)
def test_learning_rates_may_change(comm, tmp_path):
    with Table(comm, 4, 1, update=SGD(0.5)) as table:
        table.push([1], np.ones((1, 1), np.float32))
        table.save(tmp_path)
    with Table.load(comm, tmp_path, update=SGD(0.25)) as table:
        table.push([1], np.ones((1, 1), np.float32))
        assert table.pull([1]).tolist() == [[-0.75]]
