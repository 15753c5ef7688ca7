"""The cryptographic functions give the numbers of the RFCs."""

from __future__ import annotations

import numpy as np
import pytest

from gpucoll import SecureSumError
from gpucoll.federated.secure_sum import keys
from gpucoll.federated.secure_sum.masks import add_masks

raw = bytes.fromhex


def test_x25519_of_rfc_7748():
    one = raw("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    other = raw("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    public = raw("8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a")
    theirs = raw("de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f")
    common = raw("4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742")

    assert (keys.public_key(one), keys.public_key(other)) == (public, theirs)
    assert keys.shared_secret(one, theirs) == keys.shared_secret(other, public) == common


@pytest.mark.parametrize(
    ("scalar", "u", "expected"),
    [
        (
            "a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4",
            "e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c",
            "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552",
        ),
        (
            "4b66e9d4d1b4673c5ad22691957d6af5c11b6421e0ea01d42ca4169e7918ba0d",
            "e5210f12786811d3f4b7959d0538ae2c31dbe7106fc03c3efc4cd549c715a493",
            "95cbde9476e8907d7aade45cb4b873f88b595a68799fa152e6f8f7647aac7957",
        ),
    ],
)
def test_multiplications_of_rfc_7748(scalar, u, expected):
    assert keys.shared_secret(raw(scalar), raw(u)).hex() == expected


def test_a_thousand_multiplications_of_rfc_7748():
    scalar = u = raw("09" + 31 * "00")
    for _ in range(1000):
        scalar, u = keys.shared_secret(scalar, u), scalar
    assert scalar.hex() == "684cf59ba83309552800ef566f2f4d3c1c3887c49360e3875f2eb94d99532c51"


@pytest.mark.parametrize("public", [bytes(32), b"\x01" + bytes(31)])
def test_points_of_low_order_are_refused(public):
    with pytest.raises(SecureSumError, match="invalid"):
        keys.shared_secret(b"\x07" * 32, public)


@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (
            raw("0b" * 22),
            raw("000102030405060708090a0b0c"),
            raw("f0f1f2f3f4f5f6f7f8f9"),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            bytes(range(0x50)),
            bytes(range(0x60, 0xB0)),
            bytes(range(0xB0, 0x100)),
            "b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb"
            "41c65e590e09da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87",
        ),
        (
            raw("0b" * 22),
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
)
def test_hkdf_of_rfc_5869(secret, salt, info, expected):
    assert keys.derive(secret, info, salt, len(expected) // 2).hex() == expected


def test_chacha20_of_rfc_8439():
    """Appendix A.1, vectors 1 and 2: the first two blocks of the stream of the key 0."""
    expected = raw(
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )
    vector = np.zeros(128, np.uint8)

    add_masks(vector, [(bytes(32), True)])

    assert vector.tobytes() == keys.key_stream(bytes(32)).update(bytes(128)) == expected
    assert keys.key_stream(bytes(32), block=1).update(bytes(64)) == expected[64:]


def test_sealing_of_rfc_8439():
    """Section 2.8.2."""
    key, nonce = bytes(range(0x80, 0xA0)), raw("070000004041424344454647")
    bound = raw("50515253c0c1c2c3c4c5c6c7")
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the "
        b"future, sunscreen would be it."
    )
    expected = (
        "d31a8d34648e60db7b86afbc53ef7ec2a4aded51296e08fea9e2b5a736ee62d63dbea45e8ca9671282fafb69da"
        "92728b1a71de0a9e060b2905d6a5b67ecd3b3692ddbd7f2d778b8c9803aee328091b58fab324e4fad675945585"
        "808b4831d7bc3ff4def08e4b7a9de576d26586cec64b61161ae10b594f09e26a7e902ecbd0600691"
    )

    sealed = keys.seal(key, text, bound, nonce)

    assert sealed.hex() == expected
    assert keys.unseal(key, sealed, bound, nonce) == text
    for changed in (sealed[:-1], bytes([sealed[0] ^ 1]) + sealed[1:]):
        with pytest.raises(SecureSumError, match="was changed"):
            keys.unseal(key, changed, bound, nonce)


def test_signature_of_rfc_8032():
    """Section 7.1, test 1."""
    private = raw("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    public = raw("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    signature = raw(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701"
        "cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )

    assert keys.verify_key(private) == public
    assert keys.sign(private, b"") == signature
    assert keys.is_signed(public, b"", signature)
    assert not keys.is_signed(public, b"x", signature)
    assert not keys.is_signed(bytes(31), b"", signature)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64])
@pytest.mark.parametrize("size", [0, 1, 63, 1 << 18, (1 << 18) + 5])
@pytest.mark.parametrize("threads", [1, 3])
def test_masks_are_the_stream_as_integers(dtype, size, threads):
    x = np.arange(size).astype(dtype)
    one, other = b"\x01" * 32, b"\x02" * 32
    streams = [
        np.frombuffer(keys.key_stream(key).update(bytes(x.nbytes)), dtype) for key in (one, other)
    ]
    vector = x.copy()

    add_masks(vector, [(one, True), (other, False)], threads)
    assert np.array_equal(vector, x + streams[0] - streams[1])

    add_masks(vector, [(one, False), (other, True)], threads)
    assert np.array_equal(vector, x)
