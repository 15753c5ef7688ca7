"""HKDF against the vectors of RFC 5869, appendix A.1 to A.3 (those of SHA-256)."""

from __future__ import annotations

import pytest

from gpucoll.transport.tcp.secret import MOST_KEY_BYTES, expand, extract

VECTORS = {
    "basic": (
        b"\x0b" * 22,
        bytes(range(13)),
        bytes(range(0xF0, 0xFA)),
        "077709362c2e32df0ddc3f0dc47bba6390b6c73bb50f9c3122ec844ad7c2b3e5",
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    "longer": (
        bytes(range(0x50)),
        bytes(range(0x60, 0xB0)),
        bytes(range(0xB0, 0x100)),
        "06a6b88c5853361a06104c9ceb35b45cef760014904671014a193f40c15fc244",
        "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c"
        "59045a99cac7827271cb41c65e590e09da3275600c2f09b8367793a9aca3db71"
        "cc30c58179ec3e87c14c01d5c1f3434f1d87",
    ),
    "no salt": (
        b"\x0b" * 22,
        b"",
        b"",
        "19ef24a32c717b167f33a91d6f648bdf96596776afdb6377ac434c1c293ccb04",
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
}


@pytest.mark.parametrize("name", VECTORS)
def test_vectors(name):
    secret, salt, purpose, extracted, key = VECTORS[name]

    assert extract(salt, secret).hex() == extracted
    assert expand(bytes.fromhex(extracted), purpose, len(key) // 2).hex() == key


def test_lengths():
    longest = expand(bytes(32), b"", MOST_KEY_BYTES)

    assert len(longest) == MOST_KEY_BYTES
    assert expand(bytes(32), b"", 33) == longest[:33]
    for n_bytes in (0, -1, MOST_KEY_BYTES + 1):
        with pytest.raises(ValueError, match="bytes of keys"):
            expand(bytes(32), b"", n_bytes)


def test_a_zero_at_the_end_makes_another_secret():
    assert extract(b"salt", b"secret") != extract(b"salt", b"secret\0")
