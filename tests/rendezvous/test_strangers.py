"""Processes of the same user that send rubbish, or nothing: turned away, named, and nothing else.

The last process of a pool is the stranger; the others meet meanwhile.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import threading
import time

import pytest
from tests.waiting import until

from gpucoll.errors import RendezvousDeadlineError, RendezvousError
from gpucoll.rendezvous import arrivals, frames, meeting_numbers
from gpucoll.rendezvous.arrivals import AGAIN, Arrivals
from gpucoll.rendezvous.frames import BadMessageError, Connection, encode
from gpucoll.rendezvous.job import Job
from gpucoll.rendezvous.meet import meet
from gpucoll.rendezvous.notices import address
from gpucoll.rendezvous.unix import UnixEndpoint
from gpucoll.transport.shared.layout import LAYOUT_VERSION
from gpucoll.version import __version__

LIMIT_S = 20.0


def knock(seat):
    """Connect to the meeting that the ranks of this pool are in next."""
    token = f"{seat.token}#{meeting_numbers._begun.get(seat.token, 0)}"
    deadline = time.monotonic() + LIMIT_S
    while True:
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(LIMIT_S)
        try:
            end.connect(address(token))
            return end
        except ConnectionRefusedError:
            end.close()
            assert time.monotonic() < deadline, "nobody listens"
            time.sleep(0.001)


def introduction(**changes):
    """Return what rank 1 of 2 says, with some changes."""
    same = {
        "world_size": 2,
        "the version of gpucoll": __version__,
        "the layout of the segment": LAYOUT_VERSION,
        "the backend asked for": "auto",
        "mixed": False,
        "deterministic": None,
        "direct_schedule": "auto",
    }
    return {
        "rank": 1,
        "pid": os.getpid(),
        "cpus": [0],
        "arena_bytes": 1 << 21,
        "probe": [0, "00" * 16],
        "gpu": ["", ""],
        "same": same,
        **changes,
    }


def framed(text, n_fds=0):
    return struct.pack("<II", len(text), n_fds) + text


RUBBISH = {
    "noise": (b"GET / HTTP/1.1\r\n\r\n", "announced"),
    "zeros": (bytes(8), "no JSON"),
    "a list": (framed(b"[]"), "no message"),
    "nested": (framed(b"[" * 60_000), "nested too deeply"),
    "nested beyond the limit": (framed(b"[" * 200_000), "announced 200000 bytes"),
    "4 GiB": (struct.pack("<II", 2**32 - 1, 0), "announced 4294967295 bytes"),
    "1000 descriptors": (framed(b"{}", 1000), "announced 1000 descriptors"),
    "not a number": (framed(b'{"rank": NaN, "same": {}}'), "NaN as a number"),
    "infinite": (framed(b'{"rank": Infinity, "same": {}}'), "Infinity as a number"),
    "no rank": (encode({}), "which rank it is"),
    "no int": (encode(introduction(rank=1.0)), "which rank it is"),
    "negative": (encode(introduction(rank=-1)), "which rank it is"),
    "true": (encode(introduction(rank=True)), "which rank it is"),
    "nothing agreed": (encode(introduction(same={})), "what all ranks must agree on"),
    "rank 99": (encode(introduction(rank=99)), "claims to be rank 99, but rank 1 is expected"),
    "rank 0": (encode(introduction(rank=0)), "claims to be rank 0, but rank 1 is expected"),
    "no descriptors": (encode(introduction()), "sent 0 file descriptors"),
    "no descriptors after all": (encode(introduction(), 2) + b"ff", "sent no file descriptors"),
}


def meet_beside_rubbish(seat, text, why, told):
    """Rank 1 comes when the stranger has been turned away."""
    if seat.rank == 2:
        with knock(seat) as end:
            end.sendall(text)
            answer, _ = blocking_receive(end)
            assert why in answer["error"], answer
        told.touch()
        return None
    if seat.rank == 1:
        until(told.exists)
    with seat.init(LIMIT_S, world_size=2) as comm:
        return comm.all_reduce(1)


def blocking_receive(end):
    connection = Connection(end.dup(), 1 << 20, 100)
    try:
        received = None
        deadline = time.monotonic() + LIMIT_S
        while received is None:
            assert time.monotonic() < deadline
            received = connection.receive()
        return received
    finally:
        connection.close()


@pytest.mark.soak(quick=4)
@pytest.mark.parametrize("name", RUBBISH)
def test_rubbish_is_turned_away_and_the_ranks_meet(fresh, tmp_path, name):
    assert fresh(3, meet_beside_rubbish, *RUBBISH[name], tmp_path / "told") == [2, 2, None]


WRONG_FIELDS: dict[str, list[object]] = {
    "pid": [None, 0, -1, "7", True, 1 << 40],
    "cpus": [None, [], 5, ["a"], [-1], [1.5]],
    "probe": [None, [], [0], [0, "zz"], ["0", "00" * 16], [-1, "00" * 16], [0, "00" * 9]],
    "arena_bytes": [None, 0, -1, 1.5, "1", 4096],
    "gpu": [None, "cuda", [], ["cuda"], [1, 2], ["", "", ""]],
}


def send_wrong_fields(seat, done):
    if seat.rank == 2:
        for name, values in WRONG_FIELDS.items():
            for value in values:
                fd = os.memfd_create("stranger")
                os.ftruncate(fd, 1 << 21)
                with knock(seat) as end:
                    end.sendall(encode(introduction(**{name: value}), 2))
                    socket.send_fds(end, [b"f"], [fd, fd])
                    os.close(fd)
                    answer, _ = blocking_receive(end)
                assert "introduced itself wrongly" in answer["error"], (name, value, answer)
        done.touch()
        return None
    if seat.rank == 1:
        until(done.exists)
    with seat.init(LIMIT_S, world_size=2) as comm:
        return comm.all_reduce(1)


def test_every_field_of_an_introduction_is_looked_at(fresh, tmp_path):
    assert fresh(3, send_wrong_fields, tmp_path / "done") == [2, 2, None]


def wait_beside_a_slow_one(seat):
    """The stranger sends a byte at a time, and holds a connection on which nothing comes."""
    if seat.rank == 2:
        with knock(seat) as end:
            end.sendall(struct.pack("<II", 60_000, 0))
            try:
                while not blocking_wait(end, 0.02):
                    end.sendall(b" ")
            except OSError:
                pass
        return os.getpid()
    start = time.monotonic()
    with pytest.raises(RendezvousDeadlineError) as caught:
        seat.init(0.7, world_size=2)
    return time.monotonic() - start, str(caught.value)


def blocking_wait(end, timeout_s):
    end.settimeout(timeout_s)
    try:
        return bool(end.recv(1, socket.MSG_PEEK)) or True
    except TimeoutError:
        return False


def test_the_deadline_holds_against_a_byte_at_a_time_and_names_the_sender(fresh):
    (seconds, text), process = fresh(3, wait_beside_a_slow_one, only=[0, 2])

    assert seconds < 5
    assert "rank 1 did not come" in text
    assert f"Turned away: process {process} had not introduced itself" in text


def wait_beside_noise(seat):
    if seat.rank == 2:
        for _ in range(3):
            with knock(seat) as end:
                end.sendall(encode({}))
                blocking_receive(end)
        return os.getpid()
    with pytest.raises(RendezvousDeadlineError) as caught:
        seat.init(1.0, world_size=2)
    return str(caught.value)


@pytest.mark.soak
def test_the_deadline_names_who_was_turned_away(fresh):
    text, process = fresh(3, wait_beside_noise, only=[0, 2])

    assert f"Turned away: process {process} did not say which rank it is (3 times)." in text


# --- many ---------------------------------------------------------------------------------------


def meet_among_many(seat, n_connections, n_strangers, folder, spare):
    """Strangers hold idle connections; rank 1 comes when all are there."""
    if seat.rank >= 2:
        ends = [knock(seat) for _ in range(n_connections)]
        (folder / str(seat.rank)).touch()
        until((folder / "met").exists)
        for end in ends:
            end.close()
        return None
    if seat.rank == 0 and spare:
        with seat.init(world_size=1, rank=0):
            pass  # what every communicator needs is open now
        in_use = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + spare, in_use + spare))
    if seat.rank == 1:
        until(lambda: len(list(folder.iterdir())) == n_strangers)
    with seat.init(LIMIT_S, world_size=2) as comm:
        total = comm.all_reduce(1)
    (folder / "met").touch()
    return total


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize(
    ("n_connections", "n_strangers", "spare"), [(500, 2, 0), (1, 10, 9), (20, 3, 9)]
)
def test_idle_connections_keep_nobody_out(fresh, tmp_path, n_connections, n_strangers, spare):
    world = 2 + n_strangers
    found = fresh(world, meet_among_many, n_connections, n_strangers, tmp_path, spare)

    assert found[:2] == [2, 2]


@pytest.fixture
def at_the_door(monkeypatch):
    """A function that serves what comes to a socket, each connection as another process's."""
    monkeypatch.setattr(arrivals, "_LEAST_S", 0.0)
    numbers = iter(range(1, 10_000))
    monkeypatch.setattr(frames, "peer_process", lambda end: next(numbers))
    endpoint = UnixEndpoint(Job(0, 3, f"test of strangers {os.getpid()}", "test"))
    listener = endpoint.listen("rank 0 of 3")
    name = listener.getsockname()
    served = Arrivals(listener, endpoint, 2)

    def connect():
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        end.connect(name)
        return end

    def serve():
        fds = {served._listener.fileno(), *served._waiting}
        return served.serve(fds)

    yield served, connect, serve
    served.close(b"")


def test_of_too_many_the_oldest_makes_room(at_the_door):
    served, connect, serve = at_the_door
    ends = [connect() for _ in range(200)]
    for _ in range(3):
        serve()
    assert len(served._waiting) == arrivals._MOST_WAITING
    rank = connect()
    serve()
    rank.sendall(encode({"rank": 1}))
    (introduced,) = serve()

    assert introduced.introduction == {"rank": 1}
    assert ends[0].recv(1000) == AGAIN
    assert "was one of too many" in served.strangers()
    assert "more processes" in served.strangers()
    introduced.connection.close()
    for end in [*ends, rank]:
        end.close()


def test_an_introduction_has_limited_time(at_the_door, monkeypatch):
    served, connect, serve = at_the_door
    end = connect()
    serve()
    monkeypatch.setattr(arrivals, "_INTRODUCTION_S", 0.0)
    serve()

    assert b"did not introduce itself within" in end.recv(1000)
    assert end.recv(1) == b""
    assert not served._waiting
    end.close()


# --- the other side, and the messages -------------------------------------------------------------


def test_a_rank_for_which_there_was_no_room_comes_again():
    token = f"comes again {os.getpid()}"
    caught = []

    def come():
        try:
            meet(
                Job(1, 2, token, "test"),
                introduction(),
                [],
                check=lambda *_: None,
                decide=lambda _: ({}, []),
                settle=lambda meeting: meeting,
                undo=lambda _: None,
                timeout_s=LIMIT_S,
            )
        except RendezvousError as error:
            caught.append(str(error))

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address(token))
        listener.listen()
        listener.settimeout(LIMIT_S)
        thread = threading.Thread(target=come)
        thread.start()
        for answer in (AGAIN, AGAIN, encode({"error": "enough"})):
            end, _ = listener.accept()
            with end:
                assert blocking_receive(end)[0]["rank"] == 1
                end.sendall(answer)
        thread.join(LIMIT_S)

    assert caught == ["rank 0 refused the meeting: enough"]


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    made = Connection(ours, 1 << 16, 3), Connection(theirs, 1 << 16, 3)
    yield made
    for connection in made:
        connection.close()


def test_messages_carry_descriptors(pair):
    ours, theirs = pair
    with open("/dev/null") as file:
        ours.send(encode({"rank": 3}, 3), [file.fileno()] * 3)
        ours.send(encode({"rank": 4}))
    content, fds = theirs.receive()

    assert content == {"rank": 3}
    assert len(fds) == 3
    frames.close_all(fds)
    assert theirs.receive() == ({"rank": 4}, [])
    assert theirs.receive() is None


def test_descriptors_that_nobody_takes_are_closed(pair, open_files):
    ours, theirs = pair
    before = open_files()
    with open("/dev/null") as file:
        ours.send(encode({}, 3), [file.fileno()] * 2)
    assert theirs.receive() is None
    assert len(open_files()) == len(before) + 2
    theirs.close()

    assert len(open_files()) == len(before) - 1


def test_descriptors_without_room_are_lost_with_a_reason(pair):
    ours, theirs = pair
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open("/dev/null") as file:
        ours.send(encode({}, 3), [file.fileno()] * 3)
        resource.setrlimit(resource.RLIMIT_NOFILE, (file.fileno() + 1, limits[1]))
        try:
            with pytest.raises(BadMessageError, match="ulimit -n"):
                theirs.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_message_longer_than_the_socket_takes_at_once(pair):
    ours, theirs = pair
    theirs._most = 1 << 24, 3
    sent = {"text": "x" * (1 << 22)}
    ours.send(encode(sent))
    assert ours.is_sending
    received = None
    while received is None:
        received = theirs.receive()
        ours.flush()

    assert received == (sent, [])
    assert not ours.is_sending
    assert json.loads(json.dumps(sent)) == received[0]
