"""How calls of GPU tensors are ordered on streams, on stand-ins for torch's: there is no GPU."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)


class Stream:
    """Writes down what it waits for."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event.at}")


class Tensor:
    """A tensor of a GPU."""

    is_cuda, device, shape = True, "cuda:0", (3,)

    def __init__(self, log):
        self.log = log

    def record_stream(self, stream):
        self.log.append(f"result is used on {stream.name}")


@pytest.fixture
def streams(monkeypatch):
    """Return a stand-in for torch.cuda, whose current stream can be set, and what happened."""
    import torch

    log: list[str] = []
    state = SimpleNamespace(current=None, log=log)
    state.program, state.engine = Stream("program", log), Stream("engine", log)

    class Event:
        def record(self, stream):
            self.at = f"{stream.name}, {len(log)}"
            log.append(f"recorded on {stream.name}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.current)
    return state


def request_of(tensor):
    from gpucoll.integrations.horovod.engine.request import Kind, Request
    from gpucoll.integrations.horovod.torch.arrays import TORCH

    return Request(Kind.ALLREDUCE, "x", TORCH, [tensor])


def test_the_engine_follows_the_program_and_the_program_the_engine(streams):
    request = request_of(Tensor(streams.log))
    library = request.library
    streams.current = streams.program
    library.submitted(request)
    streams.current = streams.engine
    library.begin([request])
    request.results = [Tensor(streams.log)]
    library.ended([request])
    streams.current = streams.program
    library.received(request)

    assert streams.log == [
        "recorded on program",
        "engine waits for program, 0",
        "recorded on engine",
        "program waits for engine, 2",
        "result is used on program",
    ]


def test_nothing_waits_on_one_stream(streams):
    request = request_of(Tensor(streams.log))
    library = request.library
    streams.current = streams.program
    library.submitted(request)
    library.ended([request])
    library.received(request)

    assert streams.log == ["recorded on program"] * 2


def test_a_call_that_failed_is_not_waited_for(streams):
    request = request_of(Tensor(streams.log))
    streams.current = streams.program
    request.library.submitted(request)
    request.error = RuntimeError("lost")
    streams.current = streams.engine
    request.library.received(request)

    assert streams.log == ["recorded on program"]
