"""A hundred thousand handshakes and conversations that were tampered with: not one is accepted."""

from __future__ import annotations

import random
import secrets

import pytest
from tests.transport.tcp.ends import accepting, connecting, ends, exchange

from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.handshake import HANDSHAKE_BYTES, HELLO_BYTES
from gpucoll.transport.tcp.sealed import FRAME_BYTES, Opening, Seal

N_HANDSHAKES = 40_000
N_STREAMS = 60_000
SEEDS = pytest.mark.parametrize("seed", range(4))


def mutated(data, other, rng):
    """Return `data` with one to three changes, some of them pieces of `other`; never as it was."""
    changed = bytearray(data)
    while changed == data:
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            change(changed, other, rng)
    return bytes(changed)


def change(data, other, rng):
    at = rng.randrange(len(data) + 1)
    n_bytes = rng.choice((1, 1, 2, 4, 8, 32, 64))
    kind = rng.randrange(7)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at:at] = rng.randbytes(n_bytes)
    elif kind == 3:
        del data[at : at + n_bytes]
    elif kind == 4:
        data[at : at + n_bytes] = other[at : at + n_bytes]
    elif kind == 5:
        data[at:] = other[at:]
    else:
        piece = bytes(data[at : at + n_bytes])
        to = rng.randrange(len(data) + 1)
        data[to:to] = piece


def pieces(data, rng):
    """Return `data` in pieces of random sizes: whole, halves, many."""
    if not data or rng.random() < 0.5:
        return [data]
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((1, 2, 5))))
    return [data[i:j] for i, j in zip([0, *places], [*places, len(data)], strict=True)]


def give(end, data, rng):
    """Give an end what was tampered with, until it is done or refuses."""
    try:
        for piece in pieces(data, rng):
            if end.is_done:
                return
            end.take(piece)
            assert len(end._held) < HANDSHAKE_BYTES
    except AuthenticationError:
        assert not end.is_done
        assert not end._held


def run_of(role):
    """Return a fresh end that waits, and what the right other end would say to it."""
    one, other = ends()
    proof = one.take(other.start())
    if role == "accepts":
        return other, one.start() + proof
    return one, other.take(one.start() + proof)


@pytest.mark.soak(quick=1)
@SEEDS
def test_handshakes_towards_the_accepting_end(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(secrets, "token_bytes", rng.randbytes)
    earlier = exchange(*ends())[0]
    for _ in range(N_HANDSHAKES // 8):
        end, said = run_of("accepts")
        changed = mutated(said, earlier, rng)
        give(end, changed, rng)
        # What follows a right proof, later than that, is the next layer's.
        assert not end.is_done or changed[: len(said)] == said


@pytest.mark.soak(quick=1)
@SEEDS
def test_handshakes_towards_the_connecting_end(seed, monkeypatch):
    rng = random.Random(seed)
    monkeypatch.setattr(secrets, "token_bytes", rng.randbytes)
    earlier = exchange(*ends())[1][HELLO_BYTES:]
    for _ in range(N_HANDSHAKES // 8):
        end, answer = run_of("connects")
        changed = mutated(answer, earlier, rng)
        give(end, changed, rng)
        # What follows a right proof is the next layer's, which has a MAC of its own.
        assert not end.is_done or changed[: len(answer)] == answer


@pytest.mark.soak(quick=1)
@SEEDS
def test_hellos_towards_the_connecting_end(seed, monkeypatch):
    """It sends its proof to whoever greets it, but what comes then is no proof for it."""
    rng = random.Random(seed)
    monkeypatch.setattr(secrets, "token_bytes", rng.randbytes)
    said_before = exchange(*ends())[1]
    for _ in range(500):
        one, other = connecting(), accepting()
        said = other.start()
        changed = mutated(said + said_before[HELLO_BYTES:], said_before, rng)
        give(one, changed[:HELLO_BYTES], rng)
        give(one, changed[HELLO_BYTES:], rng)
        assert not one.is_done


@pytest.mark.soak(quick=1)
@SEEDS
def test_frames(seed):
    rng = random.Random(seed)
    keys = [rng.randbytes(32) for _ in range(2)]
    payloads = [b"", b"a", b"second" * 8, bytes(200)]
    data, other = (b"".join(map(Seal(key).seal, payloads)) for key in keys)
    most_bytes = 256
    for _ in range(N_STREAMS // 4):
        opening, got = Opening(keys[0], most_bytes), []
        changed = mutated(data, other, rng)
        refused = False
        for piece in pieces(changed, rng):
            try:
                got += opening.take(piece)
            except AuthenticationError:
                refused = True
            assert len(opening._held) < most_bytes + FRAME_BYTES
        assert got == payloads[: len(got)]
        if not refused:  # then it was cut off, or what was added is no whole frame yet
            whole = sum(len(payload) + FRAME_BYTES for payload in got)
            assert changed[:whole] == data[:whole]
            assert opening.holds_part == (len(changed) > whole)
