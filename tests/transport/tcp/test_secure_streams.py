"""The same schedules over TLS, and over sockets that behave like it."""

from __future__ import annotations

import errno
import os
import shutil
import ssl
import subprocess

import numpy as np
import pytest
from tests.transport.tcp import schedules
from tests.transport.tcp import test_stream_endings as endings
from tests.transport.tcp import test_streams as plain
from tests.transport.tcp.schedules import each
from tests.transport.tcp.stream_ends import SMALL, Ends, combined_as, modelled, reduction

from gpucoll.transport.tcp.streams import Outcome, StreamStatus


@pytest.fixture(scope="module")
def contexts(tmp_path_factory):
    """Contexts of a server and a client, by a certificate made just now."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    files = ["-subj", "/CN=here", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True, timeout=60)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(certificate)
    return server, client


@pytest.fixture(params=["tls", "plain"])
def secure(request):
    """Returns keywords of `Ends`."""
    if request.param == "plain":
        return {"secure": True}
    return {"contexts": request.getfixturevalue("contexts")}


@pytest.fixture
def everywhere(monkeypatch, secure):
    """Has tests of plain connections run over these."""

    def make(count: int, kind: str = "unix", buffer_bytes: int = 0) -> Ends:
        return Ends(count, kind, buffer_bytes, **secure)

    monkeypatch.setattr(plain, "Ends", make)
    monkeypatch.setattr(endings, "Ends", make)


@pytest.mark.soak(quick=6)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", plain.SIZES)
def test_ring(everywhere, size, count):
    plain.test_ring(size, count)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("schedule", ["recursive_doubling", "halving_doubling"])
@pytest.mark.parametrize("count", [0, 1, 65_537, 3_000_000])
def test_in_place_with_partners(everywhere, schedule, count):
    plain.test_in_place_with_partners(schedule, 4, count)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "complex128"])
def test_items_that_are_split(everywhere, dtype):
    plain.test_items_that_are_split(dtype, 5003)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("buffer_bytes", [0, SMALL])
def test_rotation_in_place(everywhere, size, buffer_bytes):
    plain.test_rotation_in_place("tcp", size, buffer_bytes)


@pytest.mark.soak(quick=1)
def test_other_schedules(everywhere):
    plain.test_bruck(5, 300_001)
    plain.test_chain(2 << 20, 7, 1)
    plain.test_chain(2 << 20, 1, 1)
    plain.test_pairwise_exchange_in_place("tcp", 3, 1 << 20)
    plain.test_several_into_one_place_in_the_order_of_rows(5)
    plain.test_which_operand_is_the_left_one(0)
    plain.test_which_operand_is_the_left_one(1)
    plain.test_what_forwards_may_stand_in_the_same_step()
    plain.test_bytes_of_later_rows_and_calls_are_left_in_the_connection()
    plain.test_no_rows_and_rows_without_anybody()
    plain.test_sends_alone()
    plain.test_barrier(5)
    plain.test_nobody_passes_a_barrier_alone()


@pytest.mark.soak(quick=23)
@pytest.mark.parametrize("seed", range(100, 130))
def test_drawn_schedules(secure, seed):
    size, item_bytes = 2 + seed % 4, 4
    count = (100, 20_000, 300_000)[seed % 3] // item_bytes
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(count).astype(np.float32) for _ in range(size)]
    rows = schedules.drawn(seed, size, count * item_bytes, item_bytes)
    expected = modelled(rows, arrays, combined_as("float32", np.add))
    with Ends(size, ("unix", "tcp")[seed % 2], **secure) as ends:
        ends.complete(rows, arrays, reduction=reduction("float32"))
    for array, right in zip(arrays, expected, strict=True):
        assert array.tobytes() == right.tobytes()


def test_one_end_may_be_plain_code():
    """Both loops mean the same by their bytes."""
    arrays = plain.noise(100_000, 3)
    rows = each(schedules.ring_all_reduce, 3, 100_000, 4)
    expected = modelled(rows, arrays, combined_as("float32", np.add))
    with Ends(3, "tcp") as compiled, Ends(3, "tcp", secure=True) as other:
        mixed = compiled.streams[1]
        for place, fd in enumerate([other.sockets[1][0].fileno(), other.sockets[1][2].fileno()]):
            mixed._links[place, 0] = fd
        other.streams[1] = mixed
        other.complete(rows, arrays, reduction=reduction("float32"))
    for array in arrays:
        assert array.tobytes() == expected[0].tobytes()


@pytest.mark.parametrize("step", range(5))
def test_a_peer_that_closes_at_every_step(everywhere, step):
    endings.test_a_peer_that_closes_at_every_step("tcp", step, 1)


def test_endings(everywhere):
    endings.test_a_peer_that_is_reset()
    endings.test_a_peer_that_closes_while_it_is_sent_to("tcp")
    endings.test_a_peer_that_closes_when_all_is_there_is_not_gone()
    endings.test_a_header_that_does_not_match(2, 0)
    endings.test_a_header_that_does_not_match(2, 1)
    endings.test_rubbish_is_a_mismatch()
    endings.test_abort()
    endings.test_an_abort_that_was_there_before()
    endings.test_deadline(0.05)
    endings.test_what_is_there_is_done_though_the_deadline_is_over()
    endings.test_a_slice_ends_while_bytes_move()
    endings.test_a_signal_handler_that_returns_lets_the_call_go_on()


@pytest.mark.parametrize("moving", [False, True])
def test_ctrl_c(everywhere, moving):
    endings.test_ctrl_c(moving)


def test_rows_that_cannot_be(everywhere):
    endings.test_rows_that_cannot_be([endings.row(0, (1, 0, 9))], "not in the working buffer")
    endings.test_a_reduction_without_a_kernel()


def test_a_header_says_more_than_that_its_sender_is_gone():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endings, "Ends", lambda count, kind: Ends(count, kind, secure=True))
        endings.test_a_header_says_more_than_that_its_sender_is_gone()
        endings.test_a_header_that_matches_says_nothing_more()


def test_what_is_no_tls_ends_the_call(contexts):
    array = np.zeros(8, np.uint8)
    with Ends(2, "tcp", contexts=contexts) as ends:
        os.write(ends.sockets[1][0].fileno(), b"?" * 100)  # past TLS
        outcome = ends.run_one(0, [endings.row(0, receive=(1, 0, 8))], array)
    assert outcome == Outcome(StreamStatus.GONE, 0, errno.EPROTO)
    assert not array.any()


def test_a_slice_ends(secure):
    array = np.zeros(8, np.uint8)
    with Ends(2, "tcp", **secure) as ends:
        rows = ends.rows(0, [endings.row(0, receive=(1, 0, 8))])
        streams = ends.streams[0]
        streams.begin(rows, array.ctypes.data, 8, endings.HEADER, slice_ns=1_000_000)
        assert streams.proceed().status == StreamStatus.AGAIN
        assert streams.proceed().status == StreamStatus.AGAIN
