"""Wrong messages are refused and change nothing; no messages make a client say too much."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from tests.federated.secure_sum.playing import (
    TO_THE_END,
    Seeded,
    answer,
    clients_of,
    plain_sum,
    play,
    small,
    vectors_of,
)

from gpucoll import GpucollError, SecureSumError, TooFewClientsError
from gpucoll.federated.secure_sum import keys, messages, shamir
from gpucoll.federated.secure_sum.messages import Kind
from gpucoll.federated.secure_sum.parties import SEALED_BYTES, Advert, sealing_key

HEADER = 32
SETTINGS = small(clients=4, threshold=3)
VECTORS = vectors_of(SETTINGS)


def state_of(party):
    """Return all that a party knows, to compare it later."""
    if hasattr(party, "state"):
        return party.state()
    known = {
        k: copy.deepcopy(v) for k, v in vars(party).items() if k not in ("_settings", "_total")
    }
    return known, party._total.tobytes()


def refused(party, call, *given, match=None):
    """Check that a party refuses what it is given, and is as before."""
    before = state_of(party)
    with pytest.raises(SecureSumError, match=match) as found:
        call(*given)
    assert isinstance(found.value, GpucollError)
    assert state_of(party) == before


def finish(server, clients, inbox, step):
    """Play the rest from a step on, and compare the sum."""
    for at in range(step, TO_THE_END):
        for number, message in inbox.items():
            server.receive(answer(clients[number], at, message, VECTORS[number]))
        inbox = server.advance() if at < TO_THE_END - 1 else {}
    assert np.array_equal(server.sum(), plain_sum(SETTINGS, VECTORS, range(4)))


def damaged(message, draw):
    """Return a message with an error of a kind that is drawn; maybe one in its content."""
    kind = draw.integers(5)
    place = int(draw.integers(len(message)))
    if kind == 0:
        return message[:place]
    if kind == 1:
        return message + draw.bytes(int(draw.integers(1, 100)))
    if kind == 2:
        return draw.bytes(len(message))
    if kind == 3:
        return message[:HEADER] + draw.bytes(len(message) - HEADER)
    changed = bytearray(message)
    changed[place] ^= 1 << int(draw.integers(8))
    return bytes(changed)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("seed", range(60))
def test_damaged_messages_to_clients(seed):
    """Every one is refused: the server signs nothing, but all it says is checked by a client.

    The one that is not noticed at once is a changed set of survivors of enough clients, which
    then is not confirmed by the others.
    """
    draw = np.random.default_rng(seed)
    for step in range(1, TO_THE_END):
        server, clients, inbox, _ = play(SETTINGS, VECTORS, until=step)
        client = clients[1]
        for _ in range(10):
            wrong = damaged(inbox[1], draw)
            if step == 3 and len(wrong) == HEADER + 1 and wrong[:HEADER] == inbox[1][:HEADER]:
                continue
            refused(client, lambda w=wrong, c=client, s=step: answer(c, s, w, VECTORS[1]))
        finish(server, clients, inbox, step)


@pytest.mark.soak(quick=3)
@pytest.mark.parametrize("seed", range(60))
def test_damaged_messages_to_the_server(seed):
    """Those are refused that a server can check; nothing else may be raised, and no state left."""
    draw = np.random.default_rng(seed)
    for step in range(TO_THE_END):
        server, clients, inbox, _ = play(SETTINGS, VECTORS, until=step)
        said = {c: answer(clients[c], step, inbox[c], VECTORS[c]) for c in range(4)}
        for _ in range(10):
            wrong = damaged(said[1], draw)
            is_content = len(wrong) == len(said[1]) and wrong[:HEADER] == said[1][:HEADER]
            if is_content and step in (1, 2, 4):  # numbers, and what only its receiver can read
                continue
            refused(server, server.receive, wrong, 1)
        for message in said.values():
            server.receive(message)
        if step < TO_THE_END - 1:
            finish(server, clients, server.advance(), step + 1)


@pytest.mark.parametrize("step", range(TO_THE_END))
def test_repeated_and_late_messages_to_the_server(step):
    server, clients, inbox, _ = play(SETTINGS, VECTORS, until=step)
    said = {c: answer(clients[c], step, inbox[c], VECTORS[c]) for c in range(4)}
    for number in (0, 1, 2):
        server.receive(said[number])
        refused(server, server.receive, said[number], match="already sent")
    refused(server, server.receive, said[3], 2, match="client 2 sent .* in the name of client 3")
    if step < TO_THE_END - 1:
        after = server.advance()
        refused(server, server.receive, said[3], match="comes too late")
        for number in (0, 1, 2):
            x = VECTORS[number]
            refused(clients[number], answer, clients[number], step, inbox[number], x)
            answer(clients[number], step + 1, after[number], x)
    else:
        assert np.array_equal(server.sum(), plain_sum(SETTINGS, VECTORS, range(4)))
        with pytest.raises(SecureSumError, match="has ended"):
            server.receive(said[3])
        with pytest.raises(SecureSumError, match="not at its end"):
            server.sum()


def test_a_client_that_missed_a_step_is_left_out():
    server, *_ = play(SETTINGS, VECTORS, (5, 5, 5, 1), until=2)
    late = messages.pack(SETTINGS, Kind.MASKED, 3, VECTORS[3].tobytes())
    refused(server, server.receive, late, match="client 3 has missed an earlier step")
    assert server.missing == {0, 1, 2}


@pytest.mark.parametrize("step", range(TO_THE_END))
def test_messages_of_another_sum(step):
    server, clients, *_ = play(SETTINGS, VECTORS, until=step)
    for given in (
        {"round_id": 1},
        {"length": 8},
        {"threshold": 4},
        {"bits": 31},
        {"context": b"x"},
    ):
        other = small(**{"clients": 4, "threshold": 3, **given})
        theirs = play(other, vectors_of(other), until=step)
        said = answer(theirs[1][0], step, theirs[2][0], vectors_of(other)[0])
        refused(server, server.receive, said, match="other settings or another round_id")
        if step:
            x = VECTORS[0]
            refused(clients[0], answer, clients[0], step, theirs[2][0], x, match="other settings")


@pytest.mark.parametrize("step", range(1, TO_THE_END))
def test_messages_of_an_earlier_run_with_the_same_settings(step):
    """Keys are new each time: what an eavesdropper kept is of no use."""
    earlier = play(SETTINGS, VECTORS, seed=1, until=step)
    now = play(SETTINGS, VECTORS, seed=2, until=step)
    client = now[1][0]
    if step != 3:  # a list of survivors is in clear; the signatures show whose it is
        refused(client, answer, client, step, earlier[2][0], VECTORS[0])
    said = answer(earlier[1][0], step, earlier[2][0], VECTORS[0])
    if step == 3:
        refused(now[0], now[0].receive, said, match="signed another list")


@pytest.mark.parametrize("step", range(1, TO_THE_END))
def test_messages_for_another_client(step):
    _, clients, inbox, _ = play(SETTINGS, VECTORS, until=step)
    refused(clients[0], answer, clients[0], step, inbox[1], VECTORS[0], match="for client 1")


@pytest.mark.parametrize("asked", range(TO_THE_END))
def test_a_client_makes_each_step_once(asked):
    _, clients, *_ = play(SETTINGS, VECTORS)
    refused(clients[0], answer, clients[0], asked, b"", VECTORS[0], match="to do nothing more")
    fresh = SETTINGS.client(0)
    if asked:
        refused(fresh, answer, fresh, asked, b"", VECTORS[0], match="next step is to advertise")


def test_no_bytes_at_all():
    server = SETTINGS.server()
    refused(server, server.receive, "text", match="must be bytes; got str")
    refused(server, server.receive, b"", match="cut off: 0 of at least 32 bytes")
    refused(server, server.receive, bytes(32), match="no message of a secure sum")
    for view in (memoryview(bytes(300))[::2], np.asfortranarray(np.zeros((3, 90))).data):
        refused(server, server.receive, view, match="must be contiguous bytes")
    for kind in (bytearray, memoryview):
        server.receive(kind(SETTINGS.client(int(kind is memoryview)).advertise()))


# --- a server that lies, and clients that do ------------------------------------------------------


def survivors_for(client, members):
    """Return a list of survivors as a server that lies makes it."""
    body = messages.pack_set(members, SETTINGS.clients)
    return messages.pack(SETTINGS, Kind.SURVIVORS, client, body)


def confirmations_for(client, signatures):
    body = messages.pack_set(signatures, 4) + messages.pack_records(signatures)
    return messages.pack(SETTINGS, Kind.CONFIRMATIONS, client, body)


def test_two_lists_of_survivors_give_the_server_no_two_shares():
    """It tells clients 0 and 1 that client 3 is left, and 2 and 3 that client 0 is not.

    Each list needs three signatures, and each client signs one: neither is confirmed, and nobody
    reveals a share.
    """
    _, clients, _, _ = play(SETTINGS, VECTORS, until=3)
    lists = [{0, 1, 2, 3}, {0, 1, 2, 3}, {1, 2, 3}, {1, 2, 3}]
    signatures = {}
    for number, members in enumerate(lists):
        said = clients[number].confirm(survivors_for(number, members))
        signatures[number] = said[HEADER:]
        again = survivors_for(number, lists[-1 - number])
        refused(clients[number], clients[number].confirm, again, match="each step is made once")
    for number in range(4):
        own = {c: s for c, s in signatures.items() if lists[c] == lists[number]}
        with pytest.raises(TooFewClientsError):
            clients[number].unmask(confirmations_for(number, own))
        mixed = {c: signatures[c] for c in (1, 2, 3)}
        text = r"has not confirmed the list .* reveals nothing"
        refused(
            clients[number], clients[number].unmask, confirmations_for(number, mixed), match=text
        )


def test_a_server_cannot_sign_for_clients():
    _, clients, inbox, _ = play(SETTINGS, VECTORS, until=3)
    for number in range(4):
        clients[number].confirm(inbox[number])
    forged = {c: keys.sign(b"\x05" * 32, b"anything") for c in range(4)}
    refused(clients[0], clients[0].unmask, confirmations_for(0, forged), match="reveals nothing")


def test_a_client_reveals_one_share_of_each_client():
    """Of those left their seed's, of those lost their mask key's: never both of one."""
    stops = (5, 5, 5, 2)
    _, clients, inbox, _ = play(SETTINGS, VECTORS, stops, until=4)
    said = clients[0].unmask(inbox[0])[HEADER:]
    held = clients[0]._shares
    shares = [said[n : n + shamir.SHARE_BYTES] for n in range(0, len(said), shamir.SHARE_BYTES)]
    assert shares == [held.of_seeds[0], held.of_seeds[1], held.of_seeds[2], held.of_mask_keys[3]]


@pytest.mark.parametrize("members", [set(), {0}, {0, 1}, {1, 2, 3}])
def test_clients_refuse_lists_of_too_few_or_without_them(members):
    _, clients, _, _ = play(SETTINGS, VECTORS, until=3)
    refused(clients[0], clients[0].confirm, survivors_for(0, members))


def test_clients_refuse_keys_and_shares_of_too_few():
    """The server says that two of four are left, of whom three must be."""
    _, clients, inbox, _ = play(SETTINGS, VECTORS, until=1)
    two = messages.pack_set({0, 1}, 4)
    records = inbox[0][HEADER + 1 :]
    keys_of_two = messages.pack(SETTINGS, Kind.KEYS, 0, two, records[: len(records) // 2])
    refused(clients[0], clients[0].share_keys, keys_of_two, match="2 of 4 clients are left")

    _, clients, inbox, _ = play(SETTINGS, VECTORS, until=2)
    sealed = bytes(inbox[0][HEADER + 1 :])
    shares_of_two = messages.pack(SETTINGS, Kind.RELAYED, 0, two, sealed[: len(sealed) // 3])
    refused(clients[0], clients[0].mask, shares_of_two, VECTORS[0], match="2 of 4 clients are left")


def test_keys_that_a_server_replaced_are_noticed_with_verify_keys():
    """Without them a server that lies from the begin on plays all other clients: see the docs."""
    private = [bytes([n]) * 32 for n in range(4)]
    known = [keys.verify_key(key) for key in private]
    settings = small(clients=4, threshold=3, verify_keys=known)
    clients = clients_of(settings, signing_keys=private)
    records = {c: clients[c].advertise()[HEADER:] for c in range(4)}
    stolen = keys.public_key(b"\x09" * 32)
    with_own = Advert(keys.verify_key(b"\x01" * 31 + b"\x02"), stolen, keys.public_key(bytes(32)))
    forged = {
        "not signed by its key": Advert(known[2], stolen, stolen).signed(settings, 2, bytes(32)),
        "another key than verify_keys": with_own.signed(settings, 2, b"\x01" * 31 + b"\x02"),
    }
    for text, record in forged.items():
        body = messages.pack_set(range(4), 4) + messages.pack_records({**records, 2: record})
        message = messages.pack(settings, Kind.KEYS, 0, body)
        refused(clients[0], clients[0].share_keys, message, match=text)
        server = settings.server()
        refused(server, server.receive, messages.pack(settings, Kind.ADVERTISED, 2, record))


def test_keys_of_another_client_or_of_low_order_are_refused():
    server, one = SETTINGS.server(), SETTINGS.client(0)
    server.receive(one.advertise())
    own, signing = one._advert(), b"\x03" * 32
    for sealing, mask, text in (
        (own.sealing_key, keys.public_key(b"\x08" * 32), "one of another client"),
        (keys.public_key(b"\x08" * 32), keys.public_key(b"\x08" * 32), "a key twice"),
        (keys.public_key(b"\x08" * 32), bytes(32), "invalid"),
    ):
        record = Advert(keys.verify_key(signing), sealing, mask).signed(SETTINGS, 1, signing)
        wrong = messages.pack(SETTINGS, Kind.ADVERTISED, 1, record)
        refused(server, server.receive, wrong, match=text)
    assert server.missing == {1, 2, 3}


@pytest.mark.parametrize("gone", [(), (3,)])
def test_a_wrong_share_is_noticed(gone):
    """The server has what a client committed to, and the lost client's public key."""
    stops = [2 if c in gone else 5 for c in range(4)]
    server, clients, inbox, _ = play(SETTINGS, VECTORS, stops, until=4)
    for number in inbox:
        said = bytearray(clients[number].unmask(inbox[number]))
        if number == 1:
            said[-1 - 16] ^= 1
        server.receive(bytes(said))
    before = server._total.copy()
    with pytest.raises(SecureSumError, match="shares of client 3 do not give the secret"):
        server.sum()
    assert np.array_equal(server._total, before)


def test_no_text_pickle_or_copy_has_a_clients_secrets():
    _, clients, _, _ = play(SETTINGS, VECTORS, until=3)
    client = clients[0]
    text = repr((vars(client), client._secrets, client._shares))
    secrets = vars(client._secrets), client._shares.of_seeds, client._shares.of_mask_keys
    for secret in [value for kept in secrets for value in kept.values()]:
        assert repr(secret)[2:-1] not in text
    for take in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(SecureSumError, match="client 0 of 4 is not pickled or copied"):
            take(client)


def test_equal_randomness_is_noticed():
    clients = [SETTINGS.client(number, random=Seeded("same")) for number in range(4)]
    server = SETTINGS.server()
    server.receive(clients[0].advertise())
    with pytest.raises(SecureSumError, match="one of another client"):
        server.receive(clients[1].advertise())


def test_a_client_that_is_resumed_twice_seals_with_other_nonces():
    """With one nonce for two texts, the server would see how the two shares differ."""
    _, clients, inbox, _ = play(SETTINGS, VECTORS, until=1)
    state, key = clients[0].state(), clients[1]._secrets.sealing_key
    private = sealing_key(SETTINGS, key, clients[0]._advert().sealing_key, 0, 1)
    sealed = []
    for _ in range(2):
        said = SETTINGS.resume(state).share_keys(inbox[0])
        sealed.append(said[HEADER + keys.KEY_BYTES :][:SEALED_BYTES])
    nonces = [text[: keys.NONCE_BYTES] for text in sealed]
    shares = [
        keys.unseal(private, text[keys.NONCE_BYTES :], SETTINGS.tag, nonce)
        for text, nonce in zip(sealed, nonces, strict=True)
    ]
    assert nonces[0] != nonces[1]
    assert shares[0] != shares[1]
