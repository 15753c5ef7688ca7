"""The sum is that of the vectors, whichever clients leave; masked vectors show nothing."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.federated.secure_sum.playing import (
    TO_THE_END,
    answer,
    clients_of,
    plain_sum,
    play,
    small,
    vectors_of,
)

from gpucoll import ArgumentError, ArgumentTypeError, SecureSumError, TooFewClientsError
from gpucoll.federated import SecureSum
from gpucoll.federated.secure_sum import keys

MASK = 2


def is_enough(settings, left):
    """Return whether a step may end with these clients: in any neighbourhood, and of all."""
    return len(left) >= settings.least_clients and all(
        sum(holder in left for holder in settings.holders(client)) >= settings.threshold
        for client in range(settings.clients)
    )


def check(settings, stops, seed=0):
    """Compare a sum with the plain one; return whether there was one.

    Clients leave before their step ``stops[i]``. A client that stays as long as it must is in the
    sum from the step on in which it sends its vector.
    """
    vectors = vectors_of(settings, seed)
    before = vectors.copy()
    try:
        server, *_ = play(settings, vectors, stops, seed)
        total = server.sum()
    except TooFewClientsError:
        return False
    included = {client for client, stop in enumerate(stops) if stop > MASK}
    assert server.included == included
    assert total.dtype == settings.dtype
    assert np.array_equal(total, plain_sum(settings, vectors, included))
    assert np.array_equal(vectors, before)
    return True


@pytest.mark.parametrize(("clients", "threshold"), [(2, 2), (3, 2), (3, 3)])
def test_every_set_of_clients_that_leave(clients, threshold):
    """Each client leaves before any of the five steps, or stays: 6^n cases."""
    settings = small(clients=clients, threshold=threshold, length=3)
    for stops in itertools.product(range(TO_THE_END + 1), repeat=clients):
        assert check(settings, stops) == (stops.count(TO_THE_END) >= threshold)


@pytest.mark.soak
@pytest.mark.parametrize(("clients", "threshold"), [(4, 3), (5, 3), (6, 4)])
def test_every_set_of_more_clients_that_leave(clients, threshold):
    """Of five clients and more one order of each set."""
    settings = small(clients=clients, threshold=threshold, length=3)
    choose = itertools.combinations_with_replacement if clients > 4 else _product
    for stops in choose(range(TO_THE_END + 1), clients):
        assert check(settings, stops) == (stops.count(TO_THE_END) >= threshold)


def _product(values, repeat):
    return itertools.product(values, repeat=repeat)


@pytest.mark.soak(quick=1)
@pytest.mark.parametrize("seed", range(3))
def test_every_set_of_clients_that_leave_with_neighbours(seed):
    """Each of six clients, with four neighbours, leaves before sending its vector, or stays."""
    settings = small(clients=6, threshold=4, neighbours=4, length=3, round_id=seed)
    for stops in itertools.product((MASK, TO_THE_END), repeat=6):
        stayed = {client for client, stop in enumerate(stops) if stop == TO_THE_END}
        assert check(settings, stops) == is_enough(settings, stayed)


@pytest.mark.soak(quick=2)
@pytest.mark.parametrize("seed", range(30))
def test_random_sums(seed):
    """Sizes, bits, neighbours and leaving clients at random; up to half as many leave as may."""
    draw = np.random.default_rng(seed)
    clients = int(draw.integers(10, 40))
    neighbours = None if seed % 2 else int(draw.integers(4, (clients - 1) // 2)) * 2
    holders = clients if neighbours is None else neighbours + 1
    threshold = clients // 2 + 1 if neighbours is None else neighbours // 2 + 2
    settings = SecureSum(
        clients,
        threshold,
        length=int(draw.integers(0, 500)),
        bits=int(draw.integers(8, 65)),
        neighbours=neighbours,
        round_id=seed,
    )
    leave = draw.choice(clients, (holders - threshold) // 2, replace=False)
    stops = [int(draw.integers(TO_THE_END)) if c in leave else TO_THE_END for c in range(clients)]
    assert check(settings, stops, seed)


@pytest.mark.parametrize("bits", [8, 9, 16, 31, 32, 33, 63, 64])
def test_every_number_of_bits(bits):
    settings = small(bits=bits)
    assert settings.dtype.itemsize == min(size for size in (1, 2, 4, 8) if 8 * size >= bits)
    assert check(settings, (TO_THE_END, MASK, TO_THE_END))
    assert check(settings, (TO_THE_END,) * 3)


def test_the_largest_numbers_wrap():
    settings = small(bits=11)
    most = np.full((3, 7), 2**11 - 1, np.uint16)
    assert play(settings, most)[0].sum().tolist() == [2**11 - 3] * 7


def test_smaller_dtypes_are_taken():
    settings = small(bits=32)
    vectors = [np.full(7, 200, dtype) for dtype in (np.uint8, np.uint16, np.uint32)]
    assert play(settings, vectors)[0].sum().tolist() == [600] * 7


def test_one_more_in_a_vector_is_one_more_in_the_sum():
    settings = small()
    vectors = vectors_of(settings)
    total = play(settings, vectors)[0].sum()
    vectors[1, 4] += 1
    more = play(settings, vectors, seed=1)[0].sum()
    assert (more - total).tolist() == [0, 0, 0, 0, 1, 0, 0]


def test_the_same_randomness_gives_the_same_messages():
    settings = small(clients=5, threshold=3, round_id=7)
    stops = (5, 2, 5, 5, 4)
    vectors = vectors_of(settings)
    first, again, other = (play(settings, vectors, stops, seed)[-1] for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_client_that_is_saved_and_resumed_goes_on_alike():
    settings = small()
    vectors = vectors_of(settings)
    whole = play(settings, vectors)[-1]
    for saved in range(2, TO_THE_END + 1):  # what share_keys draws before is not in the state
        clients = clients_of(settings)
        transcript, inbox, server = [], dict.fromkeys(range(3)), settings.server()
        for step in range(TO_THE_END):
            if saved == step:
                clients = [settings.resume(client.state()) for client in clients]
            for number, message in inbox.items():
                transcript.append(answer(clients[number], step, message, vectors[number]))
                server.receive(transcript[-1])
            inbox = server.advance() if step < TO_THE_END - 1 else {}
            transcript += inbox.values()
        assert transcript == whole
        for client in clients:
            with pytest.raises(SecureSumError, match="do nothing more"):
                settings.resume(client.state()).unmask(b"")
        with pytest.raises(SecureSumError, match="too long"):
            settings.resume(clients[0].state() + bytes(40))
        for cut in (0, 10, 30, 100, 190, 300):
            with pytest.raises(SecureSumError):
                settings.resume(clients[0].state()[:cut])


def test_clients_have_masks_with_their_neighbours_only():
    settings = SecureSum(30, 5, 1, neighbours=6)
    for client in range(30):
        holders = settings.holders(client)
        assert len(set(holders)) == 7
        assert client in holders
        assert all(client in settings.holders(holder) for holder in holders)
    other = SecureSum(30, 5, 1, neighbours=6, round_id=1)
    assert any(other.holders(client) != settings.holders(client) for client in range(30))


def is_connected(settings, clients):
    """Return whether these clients have masks in common, each with some, and all by way of some."""
    reached, fresh = set(), {min(clients)}
    while fresh:
        reached |= fresh
        near = {holder for client in fresh for holder in settings.holders(client)}
        fresh = (near & clients) - reached
    return reached == clients


def test_survivors_with_neighbours_are_always_connected():
    """Otherwise the server would learn the sum of each part: threshold k/2 + 2 prevents it."""
    settings = small(clients=9, threshold=4, neighbours=4)
    for stayed in itertools.chain.from_iterable(
        itertools.combinations(range(9), size) for size in range(1, 10)
    ):
        if is_enough(settings, set(stayed)):
            assert is_connected(settings, set(stayed))


@pytest.mark.parametrize(("helpers", "neighbours", "threshold"), [(1, 6, 6), (1, 4, 4)])
def test_honest_survivors_are_connected_with_as_few_helpers_as_documented(
    helpers, neighbours, threshold
):
    """Helpers show the server their masks, so that they connect nobody.

    Threshold k/2 + 2 + h is for h of them among the holders of each client. With k/2 + 2 one in
    each neighbourhood is enough, with the right clients gone, to learn the sums of two parts.
    """
    settings = small(clients=11, threshold=threshold, neighbours=neighbours)
    splits = 0
    for bad in itertools.chain(*(itertools.combinations(range(11), n) for n in range(1, 6))):
        honest = set(range(11)) - set(bad)
        for helping in itertools.chain(*(itertools.combinations(bad, n) for n in range(1, 4))):
            counts = [len(set(helping) & set(settings.holders(c))) for c in range(11)]
            if max(counts) > helpers or not is_enough(settings, honest | set(helping)):
                continue
            splits += not is_connected(settings, honest)
    assert (splits == 0) == (threshold >= neighbours // 2 + 2 + helpers)


# --- what the server sees -------------------------------------------------------------------------


def chi_square(values, bins):
    """Return by how many standard deviations the counts of bins exceed those of uniform values."""
    counts = np.bincount(values, minlength=bins)
    expected = len(values) / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / np.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("bits", [20, 32])
def test_masked_vectors_are_uniform(bits):
    check_uniform(200_000, bits)


@pytest.mark.soak
@pytest.mark.parametrize("bits", [20, 32, 64])
def test_long_masked_vectors_are_uniform(bits):
    check_uniform(10_000_000, bits)


def check_uniform(length, bits):
    """Whatever the vector: all numbers are 3, and the server sees uniform ones.

    The statistic of uniform values lies, for so many bins, above 6 standard deviations with a
    probability below 1e-7. The randomness is seeded, so that a run that passes always does.
    """
    settings = SecureSum(2, 2, length, bits)
    _, clients, inbox, _ = play(settings, [None, None], until=MASK)
    message = clients[1].mask(inbox[1], np.full(length, 3, settings.dtype))
    masked = np.frombuffer(message, settings.dtype, offset=32)

    assert masked.max() < 1 << bits
    for part in range(0, bits - 11, 4):
        bins = (masked >> masked.dtype.type(part)) & masked.dtype.type(0xFFF)
        assert abs(chi_square(bins.astype(np.int64), 1 << 12)) < 6
    assert len(np.unique(masked[:1000])) > 990
    changes = (masked[:-1] ^ masked[1:]) & masked.dtype.type(0xFF)
    assert abs(chi_square(changes.astype(np.int64), 256)) < 6


def test_what_dropped_clients_sent_stays_masked():
    """With a client's mask key, which the server learns if it leaves, its own mask is left."""
    settings = small()
    vectors = vectors_of(settings)
    clients = clients_of(settings)
    server, _, inbox, _ = play(settings, vectors, until=MASK, clients=clients)
    late = clients[2].mask(inbox[2], vectors[2])
    for number in (0, 1):
        server.receive(clients[number].mask(inbox[number], vectors[number]))
    for step in (3, 4):
        inbox = server.advance()
        for number in (0, 1):
            server.receive(answer(clients[number], step, inbox[number], None))
    with pytest.raises(SecureSumError, match="kind MASKED"):
        server.receive(late)
    assert np.array_equal(server.sum(), plain_sum(settings, vectors, {0, 1}))


# --- too few, and wrong settings ------------------------------------------------------------------


@pytest.mark.parametrize("step", range(TO_THE_END))
def test_below_the_threshold_nothing_is_revealed_and_more_may_come(step):
    settings = small(clients=4, threshold=3)
    vectors = vectors_of(settings)
    server, clients, inbox, _ = play(settings, vectors, until=step)
    said = [answer(clients[c], step, inbox[c], vectors[c]) for c in range(4)]
    for message in said[:2]:
        server.receive(message)
    close = server.sum if step == TO_THE_END - 1 else server.advance
    for _ in range(2):
        with pytest.raises(TooFewClientsError, match=r"2 of 4 clients are left, and .* needs 3"):
            close()
    assert server.missing == {2, 3}
    server.receive(said[3])
    assert close() is not None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"clients": 1}, "clients must be 2 to 65536; got 1"),
        ({"threshold": 1}, "threshold must be 2 to 3; got 1"),
        ({"threshold": 4}, "threshold must be 2 to 3; got 4"),
        ({"clients": 4, "threshold": 2}, "threshold must be 3 to 4; got 2"),
        ({"clients": 9, "threshold": 3, "neighbours": 4}, "threshold must be 4 to 5; got 3"),
        ({"clients": 9, "threshold": 4, "neighbours": 5}, "neighbours must be an even number"),
        ({"clients": 9, "threshold": 4, "neighbours": 9}, "neighbours must be 2 to 8"),
        ({"bits": 7}, "bits must be 8 to 64; got 7"),
        ({"bits": 65}, "bits must be 8 to 64; got 65"),
        ({"length": -1}, "length must be 0 to"),
        ({"round_id": -1}, "round_id must be 0 to"),
        ({"verify_keys": [bytes(32)] * 3}, "verify_keys must be 3 different keys"),
        ({"verify_keys": [bytes(31)] * 3}, "verify_keys must have 32 bytes; got 31"),
    ],
)
def test_wrong_settings(given, text):
    with pytest.raises(ArgumentError, match=text):
        small(**given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"context": "x"}, "context must be bytes"),
        ({"threshold": 2.0}, "must be an int"),
        ({"length": True}, "must be an int"),
    ],
)
def test_settings_of_wrong_types(given, text):
    with pytest.raises(ArgumentTypeError, match=text):
        small(**given)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (np.zeros(6, np.uint32), ArgumentError, r"shape \(7,\); got \(6,\)"),
        (np.zeros(7, np.int32), ArgumentTypeError, "unsigned integers up to uint32; got int32"),
        (np.zeros(7, np.uint64), ArgumentTypeError, "got uint64"),
        (np.zeros(7), ArgumentTypeError, "got float64"),
        (np.full(7, 1 << 20, np.uint32), ArgumentError, r"below 2\*\*20; it has a larger number$"),
    ],
)
def test_wrong_vectors_change_nothing(x, error, text):
    settings = small(bits=20)
    vectors = vectors_of(settings)
    server, clients, inbox, _ = play(settings, vectors, until=MASK)
    with pytest.raises(error, match=text):
        clients[0].mask(inbox[0], x)
    for number in range(3):
        server.receive(clients[number].mask(inbox[number], vectors[number]))


def test_signing_keys_must_fit():
    private = [bytes([n]) * 32 for n in range(3)]
    settings = small(verify_keys=[keys.verify_key(key) for key in private])
    with pytest.raises(ArgumentError, match="client 1 needs a signing_key"):
        settings.client(1)
    with pytest.raises(ArgumentError, match=r"not that of verify_keys\[1\]"):
        settings.client(1, signing_key=private[2])
    with pytest.raises(ArgumentTypeError, match="signing_key must be bytes; got str"):
        settings.client(1, signing_key="x" * 32)
    with pytest.raises(ArgumentError, match="number must be 0 to 2; got 3"):
        settings.client(3)
    clients = clients_of(settings, signing_keys=private)
    vectors = vectors_of(settings)
    server, *_ = play(settings, vectors, clients=clients)
    assert np.array_equal(server.sum(), plain_sum(settings, vectors, range(3)))
