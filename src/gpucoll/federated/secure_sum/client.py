"""A client of a secure sum: it takes the server's messages, and returns its own."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import numpy.typing as npt

from gpucoll.errors import SecureSumError
from gpucoll.federated.secure_sum import keys, messages, shamir
from gpucoll.federated.secure_sum.masks import add_masks, all_cpus
from gpucoll.federated.secure_sum.messages import Bytes, Kind
from gpucoll.federated.secure_sum.parties import (
    ADVERT_BYTES,
    SEALED_BYTES,
    TWO_SHARES_BYTES,
    Advert,
    commitment,
    confirmed_text,
    kept_shares,
    own_mask,
    pair_mask,
    point,
    sealing_key,
)

if TYPE_CHECKING:
    from gpucoll.federated.secure_sum.protocol import SecureSum

_STATE = struct.Struct("<4sBBH16s")  # magic, version, step, client, tag
_MAGIC, _VERSION = b"gcSC", 1


class Step(IntEnum):
    """What a client does next."""

    ADVERTISE = 0
    SHARE_KEYS = 1
    MASK = 2
    CONFIRM = 3
    UNMASK = 4
    NOTHING = 5


@dataclass(frozen=True, repr=False)  # no traceback or log shows one
class _Secrets:
    """What only this client knows, 32 bytes each."""

    signing_key: bytes
    sealing_key: bytes
    mask_key: bytes
    seed: bytes
    own_share: bytes = bytes(shamir.SHARE_BYTES)  # of the seed; the other shares are given away


@dataclass(frozen=True)
class _Keys:
    """The public keys of the clients that take part."""

    body: bytes
    adverts: dict[int, Advert]


@dataclass(frozen=True, repr=False)
class _Shares:
    """The clients that shared their keys, and the shares of them that this one holds."""

    shared: frozenset[int]
    of_mask_keys: dict[int, bytes]
    of_seeds: dict[int, bytes]


class SecureSumClient:
    """The state machine of a client; `SecureSum.client` makes it.

    The methods `advertise`, `share_keys`, `mask`, `confirm` and `unmask` are called in this order,
    each once. All but the first take the server's last message. They return the message to the
    server. If one raises, nothing has changed: it can be called again with the right message.

    The client gives the server either a share of a client's seed or one of its mask's key, never
    both: which of them follows from the list of those that are left, which it signs once.

    Attributes
    ----------
    number : int
        Which client this is.
    """

    def __init__(
        self, settings: SecureSum, number: int, secrets: _Secrets, random: Callable[[int], bytes]
    ) -> None:
        self.number = number
        self._settings = settings
        self._secrets = secrets
        self._random = random
        self._step = Step.ADVERTISE
        self._accepted: list[bytes] = []  # of the server's messages; they are most of the state
        self._keys = _Keys(b"", {})
        self._shares = _Shares(frozenset(), {}, {})
        self._survivors: frozenset[int] = frozenset()

    @staticmethod
    def new(
        settings: SecureSum, number: int, signing_key: bytes, random: Callable[[int], bytes]
    ) -> SecureSumClient:
        """Return a client with new keys."""
        drawn = [shamir.to_bytes(shamir.draw(random)) for _ in range(3)]
        return SecureSumClient(settings, number, _Secrets(signing_key, *drawn), random)

    def advertise(self) -> bytes:
        """Return this client's public keys."""
        self._expect(Step.ADVERTISE)
        record = self._advert().signed(self._settings, self.number, self._secrets.signing_key)
        self._step = Step.SHARE_KEYS
        return self._packed(Kind.ADVERTISED, record)

    def share_keys(self, message: Bytes) -> bytes:
        """Take all public keys; return shares of this client's secrets, encrypted for each holder.

        Cost: clients checks of a signature (0.1 ms each), 2 * threshold * clients multiplications.
        """
        self._expect(Step.SHARE_KEYS)
        received = self._read_keys(message)
        settings, secrets = self._settings, self._secrets
        holders = kept_shares(settings, received.adverts, self.number)
        points = [point(holder) for holder in holders]
        split = [
            shamir.split(int.from_bytes(secret, "little"), points, settings.threshold, self._random)
            for secret in (secrets.mask_key, secrets.seed)
        ]
        both = dict(zip(holders, map(b"".join, zip(*split, strict=True)), strict=True))
        own = both.pop(self.number)[shamir.SHARE_BYTES :]
        sealed = {to: self._sealed(to, received.adverts[to], text) for to, text in both.items()}
        digest = commitment(settings, secrets.seed, self.number)
        answer = self._packed(Kind.SHARES, digest, messages.pack_records(sealed))
        self._keys, self._secrets = received, replace(secrets, own_share=own)
        self._accept(message)
        return answer

    def mask(self, message: Bytes, x: npt.ArrayLike) -> bytes:
        """Take the shares of others; return the masked vector x.

        Parameters
        ----------
        message : bytes
            The server's.
        x : array_like
            Unsigned integers below 2**bits, shape (length,). Unchanged.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            x is wrong.
        SecureSumError, TooFewClientsError
            The message is wrong, or this step is not the next one.

        Cost: a key exchange and a pass of ChaCha20 over the vector for each client with which this
        one has a mask, on all CPUs of the process, and memory of two vectors.
        """
        self._expect(Step.MASK)
        received = self._read_shares(message)
        settings = self._settings
        vector = settings.checked(x)
        masks = [(own_mask(settings, self._secrets.seed, self.number), True)]
        for other in received.of_mask_keys:
            public = self._keys.adverts[other].mask_key
            pair = pair_mask(settings, self._secrets.mask_key, public, self.number, other)
            masks.append((pair, self.number < other))
        add_masks(vector, masks, all_cpus())
        settings.reduce(vector)
        answer = self._packed(Kind.MASKED, vector.view(np.uint8).data)
        self._shares = received
        self._accept(message)
        return answer

    def confirm(self, message: Bytes) -> bytes:
        """Take the list of the clients whose vectors the server has; return its signature."""
        self._expect(Step.CONFIRM)
        survivors = self._read_survivors(message)
        signature = keys.sign(self._secrets.signing_key, self._confirmed_text(survivors))
        self._survivors = survivors
        self._accept(message)
        return self._packed(Kind.CONFIRMED, signature)

    def unmask(self, message: Bytes) -> bytes:
        """Take the signatures of others; return the shares that the server needs for the sum.

        Those are shares of the seeds of clients whose vectors are in the sum, and of the mask keys
        of clients that left after they had shared their keys.
        """
        self._expect(Step.UNMASK)
        self._check_confirmations(message)
        shares = {}
        for client in kept_shares(self._settings, self._shares.shared, self.number):
            held = self._shares.of_seeds if client in self._survivors else self._shares.of_mask_keys
            shares[client] = held[client]
        self._accept(message)
        return self._packed(Kind.UNMASKED, messages.pack_records(shares))

    def __reduce__(self) -> NoReturn:
        raise SecureSumError(
            f"{self._name()} is not pickled or copied: state() returns its private keys as bytes, "
            "of which one copy may go on"
        )

    def state(self) -> bytes:
        """Return this client as bytes, for `SecureSum.resume`.

        They contain its private keys: delete them after the round, because with them whoever kept
        the messages finds the vector. The client must go on once only. Two copies that mask two
        vectors show the server their difference; two that sign two lists show it the vector.
        """
        secrets = self._secrets
        parts = [_STATE.pack(_MAGIC, _VERSION, self._step, self.number, self._settings.tag)]
        parts += [secrets.signing_key, secrets.sealing_key, secrets.mask_key, secrets.seed]
        parts.append(secrets.own_share)
        for message in self._accepted:
            parts += [struct.pack("<Q", len(message)), message]
        return b"".join(parts)

    @staticmethod
    def resumed(settings: SecureSum, state: bytes) -> SecureSumClient:
        """Return the client that `state` describes."""
        size = keys.KEY_BYTES
        if len(state) < _STATE.size + 5 * size:
            raise SecureSumError(f"the state of a client is cut off: {len(state)} bytes")
        magic, version, step, number, tag = _STATE.unpack_from(state)
        if (magic, version, tag) != (_MAGIC, _VERSION, settings.tag):
            raise SecureSumError("the bytes are no state of a client of this secure sum")
        if number >= settings.clients or step > Step.NOTHING:
            raise SecureSumError(f"the state names client {number} and step {step}")
        rest = state[_STATE.size :]
        secrets = _Secrets(*(rest[n * size : (n + 1) * size] for n in range(5)))
        client = SecureSumClient(settings, number, secrets, os.urandom)
        client._step = Step(min(step, Step.SHARE_KEYS))
        rest = rest[5 * size :]
        while rest and client._step < step:
            end = 8 + int.from_bytes(rest[:8], "little")
            client._take_again(rest[8:end])
            rest = rest[end:]
        if rest or client._step != step:
            raise SecureSumError("the state of a client is cut off or too long")
        return client

    def _take_again(self, message: bytes) -> None:
        """Take a message that this client had taken before its state was saved."""
        if self._step == Step.SHARE_KEYS:
            self._keys = self._read_keys(message)
        elif self._step == Step.MASK:
            self._shares = self._read_shares(message)
        elif self._step == Step.CONFIRM:
            self._survivors = self._read_survivors(message)
        self._accept(message)

    def _accept(self, message: Bytes) -> None:
        self._accepted.append(bytes(message))
        self._step = Step(self._step + 1)

    def _expect(self, step: Step) -> None:
        if self._step != step:
            raise SecureSumError(
                f"{self._name()} was asked to {_verb(step)}, and its next step is to "
                f"{_verb(self._step)}: each step is made once"
            )

    def _name(self) -> str:
        return f"client {self.number} of {self._settings.clients}"

    def _advert(self) -> Advert:
        secrets = self._secrets
        return Advert(
            keys.verify_key(secrets.signing_key),
            keys.public_key(secrets.sealing_key),
            keys.public_key(secrets.mask_key),
        )

    def _packed(self, kind: Kind, *body: Bytes) -> bytes:
        return messages.pack(self._settings, kind, self.number, *body)

    def _body(self, kind: Kind, message: Bytes) -> memoryview:
        receiver, body = messages.unpack(self._settings, kind, message)
        if receiver != self.number:
            raise SecureSumError(f"{self._name()} got a message for client {receiver}")
        return body

    def _sealed(self, to: int, advert: Advert, text: bytes) -> bytes:
        settings, private = self._settings, self._secrets.sealing_key
        key = sealing_key(settings, private, advert.sealing_key, self.number, to)
        # Drawn, although the key seals one text: a client that is resumed twice seals two.
        nonce = self._random(keys.NONCE_BYTES)
        return nonce + keys.seal(key, text, settings.tag, nonce)

    def _read_keys(self, message: Bytes) -> _Keys:
        settings, body = self._settings, self._body(Kind.KEYS, message)
        members, rest = messages.take_set(body, settings.clients)
        records = messages.take_records(rest, members, ADVERT_BYTES)
        adverts = {c: Advert.read(settings, c, record) for c, record in records.items()}
        if adverts.get(self.number) != self._advert():
            raise SecureSumError(f"the server has not the keys that {self._name()} advertised")
        public = {key for a in adverts.values() for key in (a.sealing_key, a.mask_key)}
        if len(public) != 2 * len(adverts):
            raise SecureSumError("two clients have the same key: each must draw its own")
        settings.check_left(members, members, f"{self._name()}, keys")
        return _Keys(bytes(body), adverts)

    def _read_shares(self, message: Bytes) -> _Shares:
        settings, body = self._settings, self._body(Kind.RELAYED, message)
        shared, rest = messages.take_set(body, settings.clients)
        if self.number not in shared or not shared <= self._keys.adverts.keys():
            raise SecureSumError(
                f"the clients that shared keys lack {self._name()}, or have one without keys"
            )
        settings.check_left(shared, shared, f"{self._name()}, shares")
        senders = kept_shares(settings, shared - {self.number}, self.number)
        received = _Shares(shared, {}, {self.number: self._secrets.own_share})
        private, size, nonce = self._secrets.sealing_key, shamir.SHARE_BYTES, keys.NONCE_BYTES
        for sender, sealed in messages.take_records(rest, senders, SEALED_BYTES).items():
            public = self._keys.adverts[sender].sealing_key
            key = sealing_key(settings, private, public, sender, self.number)
            try:
                text = keys.unseal(key, sealed[nonce:], settings.tag, sealed[:nonce])
                for begin in range(0, TWO_SHARES_BYTES, size):
                    shamir.from_bytes(text[begin : begin + size])
            except SecureSumError as error:
                raise SecureSumError(
                    f"{self._name()}, shares of client {sender}: {error}"
                ) from None
            received.of_mask_keys[sender] = text[:size]
            received.of_seeds[sender] = text[size:]
        return received

    def _read_survivors(self, message: Bytes) -> frozenset[int]:
        settings, body = self._settings, self._body(Kind.SURVIVORS, message)
        survivors, rest = messages.take_set(body, settings.clients)
        if len(rest) or self.number not in survivors or not survivors <= self._shares.shared:
            raise SecureSumError(
                f"the list of those that are left lacks {self._name()}, or has a client that "
                "shared no keys"
            )
        settings.check_left(self._shares.shared, survivors, f"{self._name()}, masked vectors")
        return survivors

    def _confirmed_text(self, survivors: frozenset[int]) -> bytes:
        settings, shared = self._settings, self._shares.shared
        packed = [messages.pack_set(of, settings.clients) for of in (shared, survivors)]
        return confirmed_text(settings, self._keys.body, *packed)

    def _check_confirmations(self, message: Bytes) -> None:
        settings, body = self._settings, self._body(Kind.CONFIRMATIONS, message)
        signers, rest = messages.take_set(body, settings.clients)
        if not signers <= self._survivors:
            raise SecureSumError("a client confirmed a list on which it is not")
        settings.check_left(self._shares.shared, signers, f"{self._name()}, confirmations")
        text = self._confirmed_text(self._survivors)
        records = messages.take_records(rest, signers, keys.SIGNATURE_BYTES)
        for signer, signature in records.items():
            if not keys.is_signed(self._keys.adverts[signer].verify_key, text, signature):
                raise SecureSumError(
                    f"client {signer} has not confirmed the list of those that are left that "
                    f"{self._name()} got: {self._name()} reveals nothing"
                )


def _verb(step: Step) -> str:
    return step.name.lower().replace("_", " ") if step != Step.NOTHING else "do nothing more"
