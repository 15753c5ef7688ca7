"""Which certificates a rank takes: what is wrong with files is said before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.certificates import Authority, openssl

from gpucoll import config
from gpucoll.errors import ArgumentError
from gpucoll.transport.tcp.credentials import job_tls

NAMES = (config.TLS_CERT, config.TLS_KEY, config.TLS_CA)


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates") / "theirs")


@pytest.fixture
def named(authority, monkeypatch):
    """Have the environment name files; returns a function that has it name others."""

    def name(**paths: object) -> None:
        for variable, path in paths.items():
            monkeypatch.setenv(variable, str(path))

    for variable in NAMES:
        monkeypatch.delenv(variable, raising=False)
    name(**authority.environment())
    return name


def refusal():
    with pytest.raises(ArgumentError) as caught:
        job_tls("rank 1 of 2")
    text = str(caught.value)
    assert text.startswith("rank 1 of 2: ")
    return text


def test_good_ones_and_none(named):
    assert job_tls("rank 1 of 2") is not None
    named(**dict.fromkeys(NAMES, ""))
    assert job_tls("rank 1 of 2") is None


@pytest.mark.parametrize("missing", NAMES)
def test_some_are_set_and_some_not(named, missing):
    named(**{missing: ""})

    text = refusal()

    assert f"but not {missing}" in text
    assert "Set all three on every rank, or none" in text


@pytest.mark.parametrize("variable", NAMES)
def test_a_file_that_is_not_there(named, variable, tmp_path):
    named(**{variable: tmp_path / "nowhere.pem"})

    assert f"{variable}={tmp_path}/nowhere.pem cannot be opened: No such file" in refusal()


@pytest.mark.parametrize("variable", NAMES)
def test_no_regular_file(named, variable, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    named(**{variable: tmp_path / "pipe"})

    assert f"{variable}={tmp_path}/pipe is no regular file" in refusal()


@pytest.mark.parametrize("variable", NAMES)
def test_what_is_no_pem(named, variable, tmp_path):
    path = tmp_path / "words"
    path.write_text("words and no certificate\n")
    path.chmod(0o600)
    named(**{variable: path})

    text = refusal()

    assert f"{variable}={path}" in text
    assert "in PEM" in text


@pytest.mark.parametrize("variable", NAMES)
def test_files_that_others_can_change(named, variable, tmp_path):
    path = tmp_path / "open"
    path.write_bytes(Path(os.environ[variable]).read_bytes())
    path.chmod(0o622)
    named(**{variable: path})

    text = refusal()

    assert f"{variable}={path} can be written by others than its owner (mode 622)" in text
    assert f"chmod go-w {path}" in text


def test_a_key_that_others_can_read(named, tmp_path):
    path = tmp_path / "open.key"
    path.write_bytes(Path(os.environ[config.TLS_KEY]).read_bytes())
    path.chmod(0o640)
    named(**{config.TLS_KEY: path})

    assert f"chmod 600 {path}" in refusal()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("variable", NAMES)
def test_files_of_another_user(named, variable, tmp_path):
    path = tmp_path / "foreign"
    path.write_bytes(Path(os.environ[variable]).read_bytes())
    path.chmod(0o600)
    os.chown(path, 12345, -1)
    named(**{variable: path})

    assert f"{variable}={path} belongs to user 12345" in refusal()


def test_a_key_of_another_certificate(named, authority):
    named(**{config.TLS_KEY: authority.environment("another")[config.TLS_KEY]})

    assert "do not belong together: the key is another certificate's" in refusal()


def test_a_key_with_a_passphrase(named, tmp_path):
    path = tmp_path / "closed.key"
    key = os.environ[config.TLS_KEY]
    openssl("ec -aes256 -passout pass:something", "-in", key, "-out", path)
    path.chmod(0o600)
    named(**{config.TLS_KEY: path})

    assert f"{config.TLS_KEY}={path} is encrypted" in refusal()


def test_one_that_has_expired(named, authority):
    named(**authority.environment("expired", days=-1))

    text = refusal()

    assert f"{config.TLS_CERT}={authority.folder}/expired.pem would be refused" in text
    assert "certificate has expired: make a new one, and compare the clocks" in text


def test_one_of_another_ca(named, other):
    named(**{config.TLS_CA: other.certificate})

    text = refusal()

    assert "would be refused by the other ranks" in text
    assert f"must be signed by the CA whose certificate {config.TLS_CA} names" in text


@pytest.mark.parametrize("usage", ["serverAuth", "clientAuth"])
def test_one_for_one_end_alone(named, authority, usage):
    named(**authority.environment(usage, extension=f"extendedKeyUsage={usage}"))

    assert "extendedKeyUsage must name both clientAuth and serverAuth" in refusal()


def test_one_for_both_ends(named, authority):
    named(**authority.environment("both", extension="extendedKeyUsage=clientAuth,serverAuth"))

    assert job_tls("rank 1 of 2") is not None


def test_a_ca_that_may_sign_nothing(named, authority):
    named(**authority.environment("leaf", extension="basicConstraints=critical,CA:FALSE"))
    named(**{config.TLS_CA: os.environ[config.TLS_CERT]})

    assert "holds no certificate of a CA" in refusal()


def test_a_certificate_and_its_key_in_one_file(named, tmp_path):
    path = tmp_path / "both.pem"
    parts = [Path(os.environ[name]).read_bytes() for name in (config.TLS_CERT, config.TLS_KEY)]
    path.write_bytes(b"".join(parts))
    path.chmod(0o600)
    named(**{config.TLS_CERT: path, config.TLS_KEY: path})

    assert job_tls("rank 1 of 2") is not None


def test_a_ca_in_between(named, authority, tmp_path):
    """Its certificate must lie beside the rank's, since the others know the first CA alone."""
    between = authority.below("between")
    made = between.environment(ca=authority)
    named(**made)
    assert "the same on every rank; intermediate certificates belong into" in refusal()

    path = tmp_path / "chain.pem"
    parts = [Path(made[config.TLS_CERT]), between.certificate]
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    named(**{config.TLS_CERT: path})
    assert job_tls("rank 1 of 2") is not None
