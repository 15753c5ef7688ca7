"""The engine below Horovod's names: ranks that differ, fail, or keep others waiting."""

from __future__ import annotations

import logging
import os
import signal
import threading

import numpy as np
import pytest
from tests.integrations.horovod.engines import (
    LIBRARY,
    WAIT_S,
    error_of,
    on_engine,
    other,
    reduction,
    run_in,
)
from tests.ranks import Ended

from gpucoll.integrations.horovod.engine.engine import Engine, Options
from gpucoll.integrations.horovod.engine.numpy_arrays import NumpyArrays
from gpucoll.integrations.horovod.engine.request import Kind, ReduceOp, Request
from gpucoll.integrations.horovod.exceptions import HorovodInternalError
from gpucoll.integrations.horovod.stalls import StallCheck
from gpucoll.integrations.horovod.timeline import Timeline

DIFFERENT = [
    ({"x": "np.ones(3 + rank)"}, "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of"),
    ({"x": "np.ones(3, [np.float32, np.float64][rank])"}, "Mismatched data types: One rank had"),
    ({"prescale": "1.0 + rank"}, "Mismatched prescale and/or postscale factors: One rank sent"),
    ({"op": "[ReduceOp.SUM, ReduceOp.MAX][rank]"}, "Mismatched reduction operation: One rank"),
    ({"kind": "[Kind.ALLREDUCE, Kind.BROADCAST][rank]"}, "Mismatched operations: One rank did an"),
    ({"kind": "Kind.BROADCAST", "root": "rank"}, "Mismatched BROADCAST root ranks: One rank"),
    ({"kind": "Kind.ALLGATHER", "x": "np.ones((2, 3 + rank))"}, "dimension 1 equal to 3, but"),
    ({"kind": "Kind.ALLGATHER", "x": "np.ones((2,) * (1 + rank))"}, "sent a tensor of rank 1, but"),
    ({"n": "1 + rank"}, "Mismatched group sizes: One rank sent 1 tensors"),
]


@pytest.mark.parametrize(("given", "text"), DIFFERENT)
def test_a_mismatch_fails_alone(ranks, given, text):
    @on_engine
    def differ(engine):
        rank = engine.comm.rank
        space = {"np": np, "Kind": Kind, "ReduceOp": ReduceOp, "rank": rank}
        values = {name: eval(code, space) for name, code in given.items()}  # noqa: S307
        kind, x = values.pop("kind", Kind.ALLREDUCE), values.pop("x", np.ones(3))
        bad = Request(kind, "bad", LIBRARY, [x] * values.pop("n", 1), **values)
        good = reduction(np.ones(2), "good")
        engine.submit(good)
        text = error_of(engine, bad)
        engine.wait(good)
        assert run_in(engine, reduction(np.ones(2), "bad"))[0].tolist() == [2, 2]
        return text

    for found in ranks.call(2, differ):
        assert text in found
        assert "Rank 0 and rank 1 differ in 'bad'." in found


def test_a_name_that_is_pending(ranks):
    @on_engine
    def submit_twice(engine):
        first = reduction(np.ones(1), "x")
        engine.submit(first)
        try:
            engine.submit(reduction(np.ones(1), "x"))
        except ValueError as error:
            text = str(error)
        else:
            text = ""  # the driver thread was faster
        engine.wait(first)
        assert text == "" or "same name as another tensor" in text
        return first.results[0].tolist()

    assert ranks.call(2, submit_twice) == [[2.0]] * 2


def test_a_name_that_another_rank_has_not(ranks):
    @on_engine
    def wait_for_it(engine):
        if engine.comm.rank == 0:
            first = reduction(np.ones(1), "x")
            engine.submit(first)
            with pytest.raises(ValueError, match="same name as another tensor"):
                engine.submit(reduction(np.ones(1), "x"))
            engine.run(other(Kind.BARRIER, "go on"))
            engine.wait(first)
        else:
            engine.run(other(Kind.BARRIER, "go on"))
            engine.run(reduction(np.ones(1), "x"))

    ranks.call(2, wait_for_it)


def test_waiting_where_another_request_is_finished(ranks):
    @on_engine
    def wait_inside(engine):
        told = []
        inner = reduction(np.ones(1), "inner")

        def finished(_):
            try:
                engine.run(inner)
            except RuntimeError as error:
                told.append(str(error))

        outer = reduction(np.ones(1), "outer")
        outer.finished = finished
        engine.run(outer)
        engine.wait(inner)
        return told

    text = "'inner' is waited for where another one is finished"
    assert ranks.call(2, wait_inside) == [[text]] * 2


def test_a_rank_that_is_killed(rank_server):
    def wait_for_it(comm):
        engine = Engine(comm, Options())
        if comm.rank == 1:
            engine.run(reduction(np.ones(1), "first"))
            os.kill(os.getpid(), signal.SIGKILL)
        engine.run(reduction(np.ones(1), "first"))
        pending = reduction(np.ones(1), "pending")
        engine.submit(pending)
        text = error_of(engine, reduction(np.ones(1), "second"))
        for _ in range(2):
            with pytest.raises(HorovodInternalError):
                engine.wait(pending)
            with pytest.raises(HorovodInternalError):
                engine.submit(reduction(np.ones(1), "third"))
        engine.close()
        return text

    with rank_server.fork(3) as pool:
        pool.start(wait_for_it)
        first, lost, second = pool.collect()
    for answer in (first, second):
        assert answer.error is None, answer.trace
        assert "rank 1" in answer.result
    assert isinstance(lost, Ended)


class Failing(NumpyArrays):
    """On rank 1, what happens before a call fails, as for want of memory."""

    def begin(self, requests):
        if requests[0].name == "bad":
            raise MemoryError("no memory here")


def test_a_failure_of_one_rank_alone(ranks):
    """The others do not wait for it, nor does a later call take part in theirs."""

    @on_engine
    def fail_alone(engine):
        library = Failing() if engine.comm.rank == 1 else LIBRARY
        texts = []
        for name in ("bad", "next"):
            request = Request(Kind.ALLREDUCE, name, library, [np.ones(1)])
            try:
                engine.run(request)
            except HorovodInternalError as error:
                texts.append(str(error))
        return texts

    (first, second), failed = ranks.call(2, fail_alone)
    assert failed == ["no memory here"] * 2
    assert "rank 1" in first
    assert "rank 1" in second


def test_a_callback_that_raises(ranks):
    @on_engine
    def call_back(engine):
        came = threading.Event()

        def fail(_):
            came.set()
            raise KeyError("mine")

        request = reduction(np.ones(1), "x")
        if engine.comm.rank == 0:
            request.finished = fail
        engine.submit(request)
        engine.wait(request)
        assert engine.comm.rank or came.wait(WAIT_S)
        return run_in(engine, reduction(np.ones(1), "y"))[0].tolist()

    assert ranks.call(2, call_back) == [[2.0]] * 2


def test_a_failure_is_told_once(ranks):
    """Threads that submit while the engine fails do not finish a request twice."""

    @on_engine
    def fail(engine):
        counts: dict[str, int] = {}

        def count(request):
            counts[request.name] = counts.get(request.name, 0) + 1

        for n in range(200):
            request = reduction(np.ones(1), f"t{n}")
            request.finished = count
            engine._enqueue(request)
        error = ValueError("all")
        threads = [threading.Thread(target=engine._fail, args=(error,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(counts.values()) == [1] * 200

    assert ranks.call(1, fail) == [True]


@pytest.mark.soak
def test_what_waits_for_long_is_told(ranks):
    def warn(comm):
        engine = Engine(comm.duplicate(), Options())
        records: list[logging.LogRecord] = []

        class Keeper(logging.Handler):
            def emit(self, record):
                records.append(record)

        handler = Keeper()
        log = logging.getLogger("gpucoll.horovod")
        log.addHandler(handler)
        log.propagate = False
        sets = {0: list(range(comm.world_size))}
        check = StallCheck(comm.duplicate(), {0: engine}, sets, 0.3, 1.2)
        try:
            if comm.rank != 1:
                text = error_of(engine, reduction(np.ones(1), "lonely"))
            else:
                text = ""
                while not text:
                    try:
                        engine.run(other(Kind.BARRIER, f"b{len(records)}"))
                    except HorovodInternalError as error:
                        text = str(error)
        finally:
            check.stop()
            engine.close()
            log.removeHandler(handler)
            log.propagate = True
        return text, [record.getMessage() for record in records]

    answers = ranks.call(3, warn)
    for text, _ in answers:
        assert "This is longer than 1.2 seconds" in text
    (_, told), *others = answers
    assert any("1: [lonely]" in text for text in told)
    assert [warnings for _, warnings in others] == [[], []]


def test_a_timeline_on_a_full_disk(caplog):
    """It ends; the engine goes on."""
    timeline = Timeline("/dev/full")
    request = reduction(np.ones(1), "x")
    timeline.submitted(request)
    timeline.begin([request])
    timeline.end(request)
    assert "the timeline ends here" in caplog.text
    for n in range(3):
        timeline.submitted(reduction(np.ones(1), f"later {n}"))
    assert len(timeline._free) == 1  # nothing grows that nobody will see
    timeline.close()
