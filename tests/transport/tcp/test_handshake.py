"""Handshakes of two ends, and of ends with somebody else."""

from __future__ import annotations

import hashlib
import hmac
import secrets

import pytest
from tests.transport.tcp.ends import PURPOSE, SECRET, accepting, connecting, ends, exchange, refusal

from gpucoll.errors import ArgumentError, AuthenticationError, StateError
from gpucoll.transport.tcp import handshake
from gpucoll.transport.tcp.handshake import (
    HANDSHAKE_BYTES,
    HELLO_BYTES,
    MAGIC,
    PROOF_BYTES,
    Handshake,
    Role,
    encode_purpose,
)

BOTH = pytest.mark.parametrize("make", [connecting, accepting])


class Echo:
    """Sends back what it gets."""

    def start(self):
        return b""

    def take(self, data):
        return data


# --- two ends that belong together ----------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", [1, 2, 7, HELLO_BYTES, HELLO_BYTES + 1, 1 << 20])
def test_both_ends_agree_in_pieces_of_any_size(n_bytes):
    one, other = ends()

    said = exchange(one, other, n_bytes)

    assert one.is_done
    assert other.is_done
    assert [len(data) for data in said] == [HANDSHAKE_BYTES] * 2
    assert one.send_key == other.receive_key
    assert one.receive_key == other.send_key
    assert len({one.send_key, one.receive_key}) == 2
    assert {len(key) for key in (one.send_key, one.receive_key)} == {32}
    assert one.rest == other.rest == b""


def test_keys_are_new_on_each_connection():
    keys = set()
    for _ in range(10):
        one, other = ends()
        exchange(one, other)
        keys |= {one.send_key, one.receive_key}
    assert len(keys) == 20


def test_who_receives_what_is_wanted_leaves_the_rest_alone():
    one, other = ends()
    one.take(other.start())
    pending = bytearray(one.start() + one._proofs[Role.CONNECTS] + b"not of the handshake")
    while other.n_wanted:
        piece = pending[: other.n_wanted]
        del pending[: len(piece)]
        other.take(piece)

    assert other.is_done
    assert pending == b"not of the handshake"
    assert other.n_wanted == 0


def test_what_follows_the_last_message_is_the_next_layers():
    one, other = ends()
    proof = one.take(other.start())
    answer = other.take(one.start() + proof)

    assert one.take(answer + b"frames") == b""
    assert one.rest == b"frames"
    with pytest.raises(StateError, match="next layer"):
        one.take(b"more")


def test_the_keys_come_after_the_proof():
    one, other = ends()
    one.take(other.start())
    for end in (one, other):
        for key in ("send_key", "receive_key"):
            with pytest.raises(StateError, match="has not proved"):
                getattr(end, key)
        assert end.rest == b""


def test_neither_end_shows_more_than_it_must():
    """A stranger's hello gets no value that depends on the secret; nor does the hello itself."""
    one, other = ends()
    assert other.take(one.start()) == b""
    proof = one.take(other.start())
    assert len(proof) == PROOF_BYTES
    assert SECRET not in one.start() + proof


def test_the_bytes_are_these(monkeypatch):
    """What another version of gpucoll would have to say: a change here is another version."""
    nonces = iter([bytes(range(32)), bytes(range(32, 64))])
    monkeypatch.setattr(secrets, "token_bytes", lambda n: next(nonces))
    one, other = ends()
    said = exchange(one, other)

    hellos = b"gpucoll\0\0\1\1" + bytes(range(32)) + b"gpucoll\0\0\1\2" + bytes(range(32, 64))
    extracted = sha256(bytes(range(64)), SECRET)
    key = sha256(extracted, b"gpucoll proof\0" + b"\1")
    proofs = [
        sha256(key, b"secret" + role + hellos) + sha256(key, b"purpose" + role + hellos + PURPOSE)
        for role in (b"\1", b"\2")
    ]
    assert said == [hellos[:43] + proofs[0], hellos[43:] + proofs[1]]
    first = sha256(extracted, b"gpucoll keys\0" + PURPOSE + b"\1")
    second = sha256(extracted, first + b"gpucoll keys\0" + PURPOSE + b"\2")
    assert (one.send_key, one.receive_key) == (first, second)
    assert PURPOSE == (
        b"s" + b"\0\0\0\0\0\0\0\5a job" + b"i" + b"\0\0\0\0\0\0\0\0010"
        b"s" + b"\0\0\0\0\0\0\0\7meeting"
    )


def sha256(key, data):
    return hmac.new(key, data, hashlib.sha256).digest()


def test_purposes_are_told_apart():
    purposes = [
        encode_purpose(*parts)
        for parts in ((), ("",), ("", ""), ("ab", "c"), ("a", "bc"), ("1",), (1,), (b"1",), (1, 1))
    ]
    assert len(set(purposes)) == len(purposes)


# --- two ends that do not -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "secret", [b"fedcba9876543210", SECRET + b"\0", SECRET[:-1] + b"F", SECRET * 5]
)
@pytest.mark.parametrize("who_differs", ["connects", "accepts"])
def test_another_secret(secret, who_differs):
    one, other = ends()
    if who_differs == "connects":
        one = connecting(secret)
    else:
        other = accepting(secret)
    proof = one.take(other.start())

    assert "does not know the job's secret (GPUCOLL_SECRET" in refusal(other, one.start() + proof)
    assert not other.is_done
    assert "another secret" in str(one.closed())


def test_an_end_without_a_secret_is_not_made():
    for secret in (b"", b"fifteen bytes.."):
        with pytest.raises(ArgumentError, match=r"at least 16 are needed.*secrets\.token_hex"):
            connecting(secret)


def test_a_stranger_who_takes_nothing_for_the_secret(monkeypatch):
    monkeypatch.setattr(handshake, "check_secret", lambda secret, where: secret)
    one, other = connecting(b""), accepting()
    proof = one.take(other.start())
    assert "does not know" in refusal(other, one.start() + proof)


def test_the_connecting_end_refuses_who_does_not_know_the_secret():
    """A false listener that says yes to everybody."""
    one, false = connecting(), accepting(b"another secret..")
    one.take(false.start())
    false.take(one.start())
    assert "does not know" in refusal(one, false._proofs[Role.ACCEPTS])
    with pytest.raises(StateError):
        _ = one.send_key


@pytest.mark.parametrize(
    "purpose",
    [b"", PURPOSE + b"\0", encode_purpose("a job", 1, "meeting"), encode_purpose("b", 0, "x")],
)
def test_another_purpose(purpose):
    one, other = connecting(purpose=purpose), accepting()
    proof = one.take(other.start())
    assert "knows the job's secret but takes this" in refusal(other, one.start() + proof)

    one, other = connecting(), accepting(purpose=purpose)
    one.take(other.start())
    other.take(one.start())
    assert "two jobs" in str(one.closed())
    assert "knows the job's secret but takes this" in refusal(one, other._proofs[Role.ACCEPTS])


def test_two_ends_that_both_connect_or_both_accept():
    assert "this end connects" in refusal(connecting(), connecting().start())
    assert "this end accepts" in refusal(accepting(), accepting().start())


# --- somebody in between --------------------------------------------------------------------------


@BOTH
def test_an_echo(make):
    one = make()
    with pytest.raises(AuthenticationError, match="send back what it gets"):
        exchange(one, Echo())


@BOTH
def test_an_echo_that_changes_the_role(make):
    """Its own nonce and its own proof come back: what it has proved is not what the other must."""
    one = make()
    hello = bytearray(one.start())
    hello[len(MAGIC) + 2] ^= 3
    one.take(hello)
    assert "does not know" in refusal(one, one._proofs[one._role])


def test_two_accepting_ends_get_nothing_out_of_each_other():
    """A stranger opens two connections to one listener, and has each answer the other."""
    one, two = accepting(), accepting()
    for taker, giver in ((one, two), (two, one)):
        as_if_connecting = bytearray(giver.start())
        as_if_connecting[len(MAGIC) + 2] = Role.CONNECTS.value
        assert taker.take(as_if_connecting) == b""


def test_an_earlier_run_again():
    one, other = ends()
    said_by_one, said_by_other = exchange(one, other)

    assert "does not know" in refusal(accepting(), said_by_one)
    again = connecting()
    again.take(said_by_other[:HELLO_BYTES])
    assert "does not know" in refusal(again, said_by_other[HELLO_BYTES:])


def test_nonces_swapped_on_the_way():
    """Each end gets another nonce than the other one sent: neither accepts."""
    one, other = ends()
    false = connecting(), accepting()
    proof = one.take(false[1].start())
    assert "does not know" in refusal(other, false[0].start() + proof)

    one, other = ends()
    proof = one.take(other.start())
    assert "does not know" in refusal(other, false[0].start() + proof)


# --- somebody else --------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0", b"gpucolL", b"\x17\x03\x01"])
def test_no_gpucoll(make, data):
    assert f"is no gpucoll, or another version: it sent {data[:8]!r}" in refusal(make(), data)


@BOTH
def test_tls_where_this_end_has_no_certificates(make):
    """One byte alone decides it: nobody is kept waiting."""
    for data, text in ((b"\x16", "speaks TLS"), (b"\x15\3\3\0\2\2F", "answers in TLS")):
        said = refusal(make(), data)
        assert f"{text}, but this rank has no certificates" in said
        assert "GPUCOLL_TLS_CERT" in said


@BOTH
def test_another_version(make):
    hello = bytearray((accepting if make is connecting else connecting)().start())
    hello[len(MAGIC) + 1] = 2
    text = refusal(make(), bytes(hello))
    assert "it speaks version 2 of the protocol, and this end version 1" in text


def test_more_than_the_message():
    one, other = ends()
    assert "more than its greeting" in refusal(one, other.start() + b"x")
    one = connecting()
    proof = one.take(other.start())
    assert "sent more before" in refusal(other, one.start() + proof + b"x")


def test_nobody_makes_an_end_keep_more_than_a_handshake():
    for make in (connecting, accepting):
        end = make()
        refusal(end, b"gpucoll\0" + bytes(1 << 20))
        assert not end._held
        assert end.n_wanted == 0


@pytest.mark.parametrize(
    ("make", "n_bytes", "text"),
    [
        (connecting, 0, "without gpucoll's greeting"),
        (accepting, 3, "without gpucoll's greeting"),
        (accepting, HELLO_BYTES, "before it had proved"),
        (accepting, HANDSHAKE_BYTES - 1, "before it had proved"),
        (connecting, HELLO_BYTES, "instead of taking this rank's proof"),
    ],
)
def test_a_connection_that_is_closed_meanwhile(make, n_bytes, text):
    end = make()
    said = exchange(*ends())[make is connecting]
    end.take(said[:n_bytes])
    assert text in str(end.closed())


def test_closed_after_a_refusal_says_why_it_refused():
    end = accepting()
    text = refusal(end, b"GET /")
    assert str(end.closed()) == text


def test_nothing_shows_the_secret():
    end = Handshake(SECRET, Role.CONNECTS, PURPOSE)
    assert SECRET.decode() not in repr(end) + str(end.closed())
