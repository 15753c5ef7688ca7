"""Hosts that are joined by TLS: what works over it, and certificates that do not fit."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
from tests.certificates import Authority
from tests.faults.test_ends import errors
from tests.group.world.test_bulk import (
    be_interrupted,
    be_killed,
    end_without_a_word,
    interrupted_by_a_timer,
    wait_too_long,
)
from tests.group.world.test_joining import free_point, held_after, meet
from tests.ranks import Ended
from tests.rendezvous.conftest import held_open

import gpucoll
from gpucoll import config
from gpucoll.config import environment
from gpucoll.errors import (
    AbortedError,
    ArgumentError,
    AuthenticationError,
    GpucollError,
    MismatchError,
    RendezvousDeadlineError,
)
from gpucoll.group.world import connecting
from gpucoll.group.world.bulk import Bulk
from gpucoll.group.world.exchanges import MOST_BYTES
from gpucoll.transport.tcp import secure_streams
from gpucoll.transport.tcp.credentials import certificate_files
from gpucoll.transport.tcp.secure_streams import SecureStreams
from gpucoll.transport.tcp.streams import Streams
from gpucoll.transport.tcp.tls import Tls

NONE = {config.TLS_CERT: "", config.TLS_KEY: "", config.TLS_CA: ""}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def certificates(authority):
    """Variables for the ranks."""
    return authority.environment()


# --- what works -----------------------------------------------------------------------------------


def work(comm):
    """Make calls of all kinds and sizes; return what came of them."""
    rank, n_ranks = comm.rank, comm.world_size
    found = []
    for count in (1, 1000, 100_000, 3_000_001):
        x = np.arange(count, dtype=np.float32) + rank
        found.append(float(comm.all_reduce(x)[-1]) == n_ranks * (count - 1) + sum(range(n_ranks)))
        gathered = comm.all_gather(x[:50_000])
        found.append(gathered[-1] == min(count, 50_000) - 1 + n_ranks - 1)
        moved = comm.broadcast(x, root=n_ranks - 1)
        found.append(float(moved[0]) == n_ranks - 1)
    exchanged = comm.all_to_all(np.repeat(np.arange(n_ranks), 20_000))
    found.append(set(exchanged.tolist()) == {rank})
    whole = comm.all_gather_object({"rank": rank, "data": bytes(200_000)})
    found.append([entry["rank"] for entry in whole] == list(range(n_ranks)))
    with pytest.raises(MismatchError):
        comm.all_reduce(np.ones(100_000 + rank))
    with comm.split(rank % 2) as part:
        found.append(part.all_reduce(1) == part.world_size)
        found.append(float(part.all_reduce(np.ones(300_000))[0]) == part.world_size)
    work = comm.all_reduce(np.ones(200_000), async_op=True)
    found.append(float(work.wait()[0]) == n_ranks)
    comm.check()
    return found


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aabb", "abc", "abbb", "abab"])
def test_calls(hosts, certificates, placed):
    for found in hosts.call(placed, work, environment=certificates):
        assert all(found), found


def send_all_kinds(comm):
    """Send each rank small and large arrays and objects; return whether all came, and how."""
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    works = []
    for count in (1, 3000, 1_500_000):
        for other in others:  # whole: what is not small waits for its receiver
            works.append(comm.send(np.full(count, comm.rank), other, tag=count, async_op=True))
    found = []
    for count in (1_500_000, 1, 3000):
        for other in others:
            came = comm.recv(source=other, tag=count)
            found.append(came.shape == (count,) and bool((came == other).all()))
    for other in others:
        said = {"from": comm.rank, "data": bytes(300_000)}
        works.append(comm.send_object(said, other, async_op=True))
        found.append(comm.recv_object(source=other)["from"] == other)
    gpucoll.wait_all(works, timeout_s=20)
    comm.barrier()
    return found, "gpucoll-tls" in {thread.name for thread in threading.enumerate()}


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("placed", ["ab", "aabb", "abc"])
def test_messages(hosts, certificates, placed):
    for found, is_relayed in hosts.call(placed, send_all_kinds, environment=certificates):
        assert all(found), found
        assert is_relayed


def leave_messages(comm):
    """Send something, and close at once."""
    if comm.rank == 0:
        comm.send(np.arange(500), 1)
        comm.close()
        return 0
    return int(comm.recv(source=0).sum())


def test_what_was_sent_before_close_comes(hosts, certificates):
    expected = 499 * 250

    assert hosts.call("ab", leave_messages, environment=certificates) == [0, expected]


def kind_of_group(comm):
    return comm.all_reduce(1), type(comm._group).__name__


def test_all_on_one_host(hosts, certificates):
    """They meet by TLS; then they share memory."""
    found = hosts.call("aaa", kind_of_group, environment=certificates)

    assert found == [(3, "HostGroup")] * 3


def test_certificates_of_their_own(hosts, authority):
    def meet_with(seat, certificates):
        return meet(seat, 20.0, {seat.rank: certificates[seat.rank]})

    own = [authority.environment(f"rank{rank}") for rank in range(3)]

    assert hosts.call("aab", meet_with, own, gives="seat") == [3] * 3


def test_by_a_port(hosts, certificates):
    found = hosts.call("abb", meet, 20.0, gives="seat", environment=certificates, meet=free_point())

    assert found == [3] * 3


def look(comm):
    comm.all_reduce(np.ones(100_000))
    found = dict(comm.describe().facts)
    comm.barrier()
    return found


def test_describe(hosts_with_schedules, certificates):
    for rank, facts in enumerate(hosts_with_schedules.call("aab", look, environment=certificates)):
        assert "over encrypted TCP" in facts["between hosts"], facts
        assert "pair's own, encrypted" in facts["messages"], facts
        if rank != 1:
            assert "authenticated, encrypted by TLS 1.3" in facts["links"], facts
            assert (
                "arrays over further connections, encrypted by TLS 1.3, by OpenSSL"
                in (facts["links"])
            ), facts


def count_large(comm, n_bytes):
    """Return what comes of an object, and whether it went over connections of its own."""
    transfers = []
    begin = Bulk.begin

    def noted(bulk, *arguments, **options):
        transfers.append(bulk)
        return begin(bulk, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bulk, "begin", noted)
        found = comm.broadcast_object(bytes(n_bytes) if comm.rank == 0 else None, root=0)
    return len(found), bool(transfers)


@pytest.mark.parametrize("is_encrypted", [False, True])
def test_large_objects_go_the_way_of_large_arrays(hosts_with_schedules, certificates, is_encrypted):
    large = 10 * MOST_BYTES
    variables = certificates if is_encrypted else {}

    assert (
        hosts_with_schedules.call("ab", count_large, large, environment=variables)
        == [(large, True)] * 2
    )


def by_the_kernel(comm):
    """Have this leader take its connections for such as the kernel encrypts."""
    asked = []

    def note(end):
        asked.append(end)
        return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure_streams, "is_in_kernel", note)
        made = secure_streams.secure_streams([_Numbered(0), _Numbered(1)])
        none = secure_streams.secure_streams([])
    comm.barrier()
    return type(made), len(asked), type(none)


class _Numbered:
    def __init__(self, number):
        self._number = number

    def fileno(self):
        return self._number


def test_the_compiled_loop_runs_where_the_kernel_encrypts(hosts):
    """As far as that can be seen without such a kernel: which of the two loops is chosen."""
    assert hosts.call("ab", by_the_kernel) == [(Streams, 2, SecureStreams)] * 2


def split_later(comm, changes):
    """Split when the variables are others than those that the communicator was made with."""
    with environment(changes), comm.split(0) as part:
        links = dict(part.describe().facts)["links"]
        return part.all_reduce(1), "encrypted by TLS 1.3" in links


@pytest.mark.parametrize("name", ["none", "renewed"])
def test_a_part_is_encrypted_as_the_whole_is(hosts, authority, certificates, name):
    changes = NONE if name == "none" else authority.environment("renewed")

    found = hosts.call("ab", split_later, changes, environment=certificates)

    assert found == [(2, True)] * 2


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize(("placed", "victim"), [("ab", 0), ("aabbc", 2)])
def test_a_leader_killed_while_data_moves(hosts_with_schedules, certificates, placed, victim):
    replies = hosts_with_schedules.replies(placed, be_killed, victim, environment=certificates)

    assert isinstance(replies[victim], Ended)
    for rank, reply in enumerate(replies):
        if rank != victim:
            assert reply.error is None, reply.trace
            assert f"lost rank {victim}" in reply.result


@pytest.mark.parametrize("placed", ["ab", "abc"])
def test_an_interrupt_while_data_moves(hosts_with_schedules, certificates, placed):
    replies = hosts_with_schedules.call(placed, be_interrupted, 1, environment=certificates)

    for rank, (kind, _, ends) in enumerate(replies):
        assert kind is (KeyboardInterrupt if rank == 1 else AbortedError)
        assert not ends


def test_an_interrupt_of_who_waits_for_data(hosts_with_schedules, certificates):
    found = hosts_with_schedules.call("ab", interrupted_by_a_timer, environment=certificates)

    assert found == [AbortedError, KeyboardInterrupt]


def test_a_transfer_that_takes_too_long(hosts_with_schedules, certificates):
    first, second = hosts_with_schedules.call("ab", wait_too_long, environment=certificates)

    assert "waited 0.3 s in all_reduce" in first
    assert "rank 1 of 2" in second


@pytest.mark.soak
def test_connections_that_end_without_a_word(hosts_with_schedules, certificates):
    first, *_ = hosts_with_schedules.call("abb", end_without_a_word, environment=certificates)

    assert first.startswith("rank 0 of 3 lost rank 1 (on ")


def test_nothing_is_left(hosts_with_schedules, certificates):
    for held in hosts_with_schedules.call(
        "aab", held_after, 4, gives="seat", environment=certificates
    ):
        assert len(held[0]) == len(held[-1])


def fork_a_child(comm):
    comm.all_reduce(np.ones(100_000))
    before = [name for name in held_open() if "socket" in name]
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        bulk = comm._group.bulk
        os.write(writing, b"%d" % (len(bulk._ends.sockets) if bulk else 0))
        os._exit(0)
    os.waitpid(pid, 0)
    said = os.read(reading, 10)
    os.close(reading)
    os.close(writing)
    return said, bool(before), float(comm.all_reduce(np.ones(100_000))[0])


def test_a_forked_child_keeps_none(hosts_with_schedules, certificates):
    found = hosts_with_schedules.call("ab", fork_a_child, environment=certificates)

    assert found == [(b"0", True, 2.0)] * 2


# --- certificates that do not fit -----------------------------------------------------------------


def refused(hosts, placed, changes, **options):
    """Return every rank's error; no array has moved."""
    return errors(
        hosts.replies(placed, meet, 2.0, changes, gives="seat", meet=free_point(), **options)
    )


@pytest.mark.soak
@pytest.mark.parametrize("who", [0, 1, 2])
def test_one_rank_without(hosts, certificates, who):
    found = refused(hosts, "aab", {who: NONE}, environment=certificates)

    for rank, error in enumerate(found):
        assert isinstance(error, AuthenticationError | RendezvousDeadlineError), error
        if rank in (0, who) or who == 0:
            assert config.TLS_CERT in str(error), error
            assert "on every rank of the job, or on none" in str(error), error


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("who", [0, 1])
def test_one_rank_of_another_ca(hosts, authority, certificates, tmp_path, who):
    """Its own certificate is good, by its own CA."""
    other = Authority(tmp_path / "theirs")
    found = refused(hosts, "ab", {who: other.environment()}, environment=certificates)

    for error in found:
        assert isinstance(error, AuthenticationError | RendezvousDeadlineError), error
        assert f"must be signed by the CA whose certificate {config.TLS_CA} names" in str(error)


@pytest.mark.soak
def test_bad_files_are_said_at_once(hosts, certificates, authority):
    expired = authority.environment("expired", days=-1)
    found = refused(hosts, "aab", {2: expired}, environment=certificates)

    assert isinstance(found[2], ArgumentError), found
    assert str(found[2]).startswith("rank 2 of 3: ")
    assert "certificate has expired" in str(found[2])
    for error in found[:2]:
        assert isinstance(error, RendezvousDeadlineError), error
        assert "rank 2" in str(error) or "answer" in str(error), error


def trust_fewer(seat, ca):
    """Meet; on the hosts beside rank 0's nobody trusts whom rank 0 does.

    They have met before, so that the deadline does not count what they load for TLS.
    """
    assert meet(seat, 20.0, name="trusting") == 3
    if seat.rank:
        join = connecting.Connecting

        def distrust(here, names, addresses, credentials, purpose):
            files = certificate_files()
            assert files is not None
            with pytest.MonkeyPatch.context() as unchecked:
                unchecked.setattr(Tls, "_check_own", lambda *_: b"")
                mine = Tls(files._replace(ca=ca))
            return join(here, names, addresses, credentials._replace(tls=mine), purpose)

        patch = pytest.MonkeyPatch()
        patch.setattr(connecting, "Connecting", distrust)
    try:
        return meet(seat, 2.0)
    finally:
        if seat.rank:
            patch.undo()


@pytest.mark.soak
def test_leaders_that_do_not_trust_each_other(hosts, certificates, tmp_path):
    """Rank 0 trusts all of them."""
    other = Authority(tmp_path / "theirs")
    found = errors(
        hosts.replies(
            "abc", trust_fewer, str(other.certificate), gives="seat", environment=certificates
        )
    )

    text = "".join(map(str, found))
    assert all(isinstance(error, GpucollError) for error in found), found
    assert "has no connection with" in text
    # Which of the two gives up first, and is heard, is chance.
    own = "showed a certificate that this rank does not accept"
    assert own in text or "refuses this rank's certificate" in text
    assert config.TLS_CA in text
