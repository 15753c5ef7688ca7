"""Frames with a MAC: what comes as it was sent, and what does not."""

from __future__ import annotations

import hashlib
import hmac
import random
import tracemalloc

import pytest
from tests.transport.tcp.ends import ends, exchange, refusal, sealed_pair

from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.sealed import FRAME_BYTES, TAG_BYTES, Opening, Seal

KEY = bytes(range(32))
PAYLOADS = [b"", b"x", b"frame " * 100, bytes(5000)]


def opened(opening, data, n_bytes):
    got = []
    for start in range(0, len(data), n_bytes):
        got += opening.take(data[start : start + n_bytes])
    return got


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 5, 4096, 1 << 20])
def test_pieces_of_any_size(n_bytes):
    seal, opening = sealed_pair()
    data = b"".join(map(seal.seal, PAYLOADS))

    assert opened(opening, data, n_bytes) == PAYLOADS
    assert not opening.holds_part


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_all_kinds_of_bytes(kind):
    seal, opening = sealed_pair()
    assert opening.take(kind(seal.seal(kind(b"payload")))) == [b"payload"]


def test_elements_wider_than_a_byte():
    seal, opening = sealed_pair()
    words = memoryview(bytes(range(8))).cast("I")
    assert opening.take(seal.seal(words)) == [bytes(range(8))]


def test_the_bytes_are_these():
    """What another version of gpucoll would have to say: a change here is another version."""
    seal = Seal(KEY)
    for number, payload in enumerate((b"first", b"")):
        head = number.to_bytes(8, "big") + len(payload).to_bytes(4, "big")
        tag = hmac.new(KEY, head + payload, hashlib.sha256).digest()
        assert seal.seal(payload) == head[8:] + payload + tag


def test_both_directions_at_once():
    one, other = ends()
    exchange(one, other)
    there, back = Seal(one.send_key), Seal(other.send_key)
    assert Opening(other.receive_key, 9).take(there.seal(b"there")) == [b"there"]
    assert Opening(one.receive_key, 9).take(back.seal(b"back")) == [b"back"]


# --- what does not come as it was sent ------------------------------------------------------------


def test_any_bit_changed():
    frame = Seal(KEY).seal(b"0123")
    for place in range(8 * 4, 8 * len(frame)):
        altered = bytearray(frame)
        altered[place // 8] ^= 1 << place % 8
        assert "sent a frame that is not as" in refusal(Opening(KEY, 100), bytes(altered))


def test_another_length():
    """It is covered, too: a frame cut short, and two in one."""
    seal = Seal(KEY)
    first, second = bytearray(seal.seal(b"0123")), seal.seal(b"4567")
    first[3] = 3
    assert "not as" in refusal(Opening(KEY, 100), bytes(first))
    first[3] = len(first) + 4 - FRAME_BYTES + 4
    assert "not as" in refusal(Opening(KEY, 100), bytes(first) + second + bytes(TAG_BYTES))


@pytest.mark.parametrize(
    "order", [(1, 0), (0, 0), (0, 2), (0, 1, 1), (0, 1, 0), (1,), (0, 1, 2, 2)]
)
def test_another_order(order):
    seal = Seal(KEY)
    frames = [seal.seal(b"alike") for _ in range(3)]
    data = b"".join(frames[number] for number in order)
    assert "repeated or left out" in refusal(Opening(KEY, 100), data)


def test_sent_back():
    one, other = ends()
    exchange(one, other)
    frame = Seal(one.send_key).seal(b"mine")
    assert "not as" in refusal(Opening(one.receive_key, 100), frame)


def test_of_another_connection():
    frame = sealed_pair()[0].seal(b"x")
    assert "not as" in refusal(sealed_pair()[1], frame)


def test_cut_off():
    opening = Opening(KEY, 100)
    frame = Seal(KEY).seal(b"0123")
    for place in range(len(frame)):
        assert opening.take(frame[place : place + 1]) == [b"0123"][: place == len(frame) - 1]
        assert opening.holds_part == (place < len(frame) - 1)


# --- limits ---------------------------------------------------------------------------------------


def test_too_long_for_the_other_end():
    seal, opening = sealed_pair(most_bytes=100)
    assert opening.take(seal.seal(bytes(100))) == [bytes(100)]
    header = seal.seal(bytes(101))[:4]
    assert "announced a frame of 101 bytes, but the limit is 100" in refusal(opening, header)


def test_too_long_to_be_sent():
    seal, opening = Seal(KEY, 3), Opening(KEY, 100)
    with pytest.raises(ArgumentError, match="4 bytes, but the connection's limit is 3"):
        seal.seal(b"0123")
    assert opening.take(seal.seal(b"012")) == [b"012"]


def test_a_large_frame_in_small_pieces():
    size = 20 << 20
    seal, opening = sealed_pair(most_bytes=size)
    payload = random.Random(1).randbytes(size)
    assert opened(opening, memoryview(seal.seal(payload)), 1500) == [payload]


def test_no_more_is_kept_than_a_frame():
    """Each announces as much as it may and sends it, with a wrong tag; or announces more."""
    most_bytes, piece = 1 << 18, bytes(1 << 12)
    tracemalloc.start()
    try:
        for length in (most_bytes, most_bytes + 1, (1 << 32) - 1):
            opening = Opening(KEY, most_bytes)
            before, _ = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            try:
                opening.take(length.to_bytes(4, "big"))
                while True:
                    opening.take(piece)
            except Exception:  # which one is the business of other tests
                _, peak = tracemalloc.get_traced_memory()
            # The frame as it grows, and its payload taken out of it.
            limit = 3 * most_bytes if length == most_bytes else 1 << 14
            assert peak - before < limit
            assert len(opening._held) == 0
    finally:
        tracemalloc.stop()


def test_many_small_frames_at_once():
    seal, opening = sealed_pair()
    data = b"".join(seal.seal(b"x") for _ in range(20_000))
    assert opening.take(data) == [b"x"] * 20_000
