"""torch.profiler shows a group's calls as it shows those of gloo and NCCL."""

from __future__ import annotations

from typing import Any

import pytest
from tests.waiting import until


def profiled(call, **options):
    """Return the name, the shapes and the other facts of each range of calls."""
    import json
    import tempfile
    from pathlib import Path

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], **options) as seen:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("name", "").startswith(("c10d::", "gpucoll:"))]
    return sorted(found, key=lambda event: event["ts"])


def all_calls():
    import torch
    from torch import distributed as dist

    def call():
        x, whole = torch.ones(4), torch.ones(8)
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        dist.reduce(x, 0)
        dist.all_gather([torch.ones(4), torch.ones(4)], x)
        dist.all_gather_single(whole, x)
        dist.reduce_scatter(x, [torch.ones(4), torch.ones(4)])
        dist.reduce_scatter_single(x, whole)
        dist.gather(x, [x.clone(), x.clone()] if dist.get_rank() == 0 else None, 0)
        dist.scatter(x, [x.clone(), x.clone()] if dist.get_rank() == 0 else None, 0)
        for _ in range(2):  # the second one has a plan
            dist.all_to_all([torch.ones(4), torch.ones(4)], [torch.ones(4), torch.ones(4)])
        dist.all_to_all_single(whole, torch.ones(8))
        dist.barrier()
        if dist.get_rank():
            dist.send(x, 0)
        else:
            dist.recv(x, 1)

    return [event["name"] for event in profiled(call)], dist.get_rank()


def test_names(groups):
    """Each call has torch's range and gpucoll's."""
    for names, rank in groups.call(2, all_calls):
        expected = [
            ("allreduce_", "all_reduce"),
            ("allreduce_", "all_reduce"),
            ("broadcast_", "broadcast"),
            ("reduce_", "reduce"),
            ("allgather_", "all_gather"),
            ("_allgather_base_", "all_gather"),
            ("reduce_scatter_", "reduce_scatter"),
            ("_reduce_scatter_base_", "reduce_scatter"),
            ("gather_", "gather"),
            ("scatter_", "scatter"),
            ("alltoall_", "all_to_all"),
            ("alltoall_", "all_to_all"),
            ("alltoall_base_", "all_to_all"),
            ("barrier", "barrier"),
            ("send", "send") if rank else ("recv_", "recv"),
        ]
        assert names == [
            name for c10d, own in expected for name in (f"c10d::{c10d}", f"gpucoll:{own}")
        ]


def facts():
    import torch
    from torch import distributed as dist

    x = torch.ones(3, 2, dtype=torch.float64)
    (torchs, _), (without, _) = (
        profiled(lambda: dist.all_reduce(x), record_shapes=has_shapes)
        for has_shapes in (True, False)
    )
    return torchs["args"], without["args"]


def test_shapes_bytes_and_group(groups):
    for found, without in groups.call(2, facts):
        assert found["Input Dims"] == [[3, 2]]
        assert found["Collective name"] == "allreduce"
        assert (found["In msg nelems"], found["Out msg nelems"]) == (6, 6)
        assert (found["In msg bytes"], found["dtype"]) == (48, "float64")
        assert (found["Group size"], found["Process Group Name"]) == (2, "0")
        assert "Group size" not in without


def start_and_wait(go):
    import torch
    from torch import distributed as dist

    x = torch.ones(1)

    def call():
        if dist.get_rank():
            until(go.exists)
            dist.all_reduce(x)
        else:
            work = dist.all_reduce(x, async_op=True)
            with torch.profiler.record_function("gpucoll: rank 1 may come"):
                go.touch()
            work.wait()

    return [(event["name"], event["ts"], event["ts"] + event["dur"]) for event in profiled(call)]


def test_a_range_ends_when_its_work_ends(groups, tmp_path):
    """It cannot end before rank 1 has come; that of torch ends when the call has been started."""
    started, work, told = groups.call(2, start_and_wait, tmp_path / "go")[0]
    assert [started[0], work[0]] == ["c10d::allreduce_", "gpucoll:all_reduce"]
    assert started[2] <= told[1] <= work[2]


def stop_first():
    import torch
    from torch import distributed as dist

    works, shown = [], []
    for _ in range(20):
        if dist.get_rank() == 0:
            shown.append(profiled(lambda: works.append(dist.irecv(torch.ones(1), 1))))
        dist.barrier()

        def end():
            if dist.get_rank() == 0:
                works.pop().wait()
            else:
                dist.send(torch.ones(1), 0)

        profiled(end)
    return [[event["name"] for event in each] for each in shown]


def test_a_work_that_outlives_its_profiler(groups):
    """Its range ends with the profiler. If it ended later, torch would write to freed memory."""
    shown, _ = groups.call(2, stop_first)
    assert shown == [["c10d::recv_", "gpucoll:recv"]] * 20


def fail():
    import torch
    from torch import distributed as dist

    def call():
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1 + dist.get_rank()))

    return [event["name"] for event in profiled(call)]


def test_a_call_that_fails(groups):
    assert groups.call(2, fail) == [["c10d::allreduce_", "gpucoll:all_reduce"]] * 2


def test_works_that_end_while_another_range_ends(groups):
    """A garbage collection may end further works while a range ends, in the same thread."""

    def nested():
        import torch

        from gpucoll.integrations.torch import ranges

        class Started:
            def add_done_callback(self, function):
                self.end = lambda: function(self)

        running: Any = ranges._Running()
        first, second = Started(), Started()
        for work in (first, second):
            running.add(ranges._enter("a range", None), work)
        ended = torch.futures.Future()
        running._open[1].add_done_callback(lambda _: (second.end(), ended.set_result(None)))
        first.end()
        return ended.done(), len(running._open)

    assert groups.call(1, nested) == [(True, 0)]
