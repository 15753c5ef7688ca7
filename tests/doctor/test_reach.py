"""``gpucoll-doctor --reach``: two ends on this host."""

from __future__ import annotations

import queue
import socket
import threading

import pytest
from tests.certificates import Authority

from gpucoll.doctor import cli, reach
from gpucoll.errors import AuthenticationError, RendezvousError
from gpucoll.rendezvous.addresses import join_address
from gpucoll.transport.tcp.credentials import job_tls

SECRET = "0123456789abcdef"
LIMIT_S = 20.0
FAMILIES = (socket.AF_INET, socket.AF_INET6)


@pytest.fixture
def lines(monkeypatch):
    monkeypatch.setenv("GPUCOLL_SECRET", SECRET)
    monkeypatch.setattr(reach, "_RATE_S", 0.05)
    return []


@pytest.fixture
def listening(lines, request):
    """The address at which a thread answers once, and what it has said."""
    said: queue.Queue[tuple[str, str, str]] = queue.Queue()

    def answer() -> None:
        reach.listen(address, lambda *line: said.put(line), LIMIT_S, once=True)

    host = getattr(request, "param", "127.0.0.1")
    try:
        with socket.create_server((host, 0), family=FAMILIES[":" in host]) as free:
            address = join_address(host, free.getsockname()[1])
    except OSError:
        pytest.skip(f"this host has no {host}")
    thread = threading.Thread(target=answer)
    thread.start()
    state, name, text = said.get(timeout=LIMIT_S)
    assert (state, name) == ("ok", "listening")
    assert text.startswith(f"at {address}: ")
    yield address, said
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("listening", ["127.0.0.1", "::1"], indirect=True)
def test_what_it_says(lines, listening):
    address, said = listening
    reach.reach(address, lambda *line: lines.append(line), LIMIT_S)

    names = ["interface", "connection", "handshake", "round trip", "clocks", "rate"]
    assert [line[:2] for line in lines] == [("ok", name) for name in names]
    assert socket.gethostname() in lines[2][2]
    state, _, text = said.get(timeout=LIMIT_S)
    assert state == "ok"
    assert "asked, and sent" in text


@pytest.fixture
def certificates(tmp_path, monkeypatch):
    for name, path in Authority(tmp_path / "ca").environment().items():
        monkeypatch.setenv(name, path)


def test_by_tls(certificates, lines, listening):
    address, said = listening
    reach.reach(address, lambda *line: lines.append(line), LIMIT_S)

    assert "inside of TLS 1.3: both have the same secret" in lines[2][2]
    assert lines[-1][:2] == ("ok", "rate")
    state, _, text = said.get(timeout=LIMIT_S)
    assert (state, "asked, and sent" in text) == ("ok", True), text


def test_by_tls_where_the_other_has_none(lines, listening, certificates, monkeypatch):
    """Whichever of the two it is that has certificates."""
    address, said = listening
    found = iter([job_tls("one")])
    monkeypatch.setattr(reach, "job_tls", lambda _: next(found, None))
    with pytest.raises(reach.UnreachableError, match="GPUCOLL_TLS_CERT"):
        reach.reach(address, lambda *line: lines.append(line), LIMIT_S)

    state, _, text = said.get(timeout=LIMIT_S)
    assert state == "bad"
    assert "GPUCOLL_TLS_CERT" in text


def test_another_secret(lines, listening, monkeypatch):
    address, said = listening
    secrets = iter([b"another secret 16"])
    monkeypatch.setattr(reach, "job_secret", lambda: next(secrets, SECRET.encode()))
    with pytest.raises(reach.UnreachableError, match="secret"):
        reach.reach(address, lambda *line: lines.append(line), LIMIT_S)

    state, _, text = said.get(timeout=LIMIT_S)
    assert state == "bad"
    assert "does not know the job's secret" in text


def test_nobody_there(lines):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(reach.UnreachableError, match=r"refused.*firewall rejects"):
            reach.reach(address, lambda *line: lines.append(line), LIMIT_S)


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("nowhere", "is not HOST:PORT"),
        ("no-such-host.invalid:99", "does not resolve"),
        ("[fe80::1%lo]:99", "link-local address of IPv6"),
    ],
)
def test_no_address(lines, address, text):
    with pytest.raises(reach.UnreachableError, match=text):
        reach.reach(address, lambda *line: lines.append(line), LIMIT_S)
    with pytest.raises(RendezvousError, match=text):
        reach.listen(address, lambda *line: lines.append(line), LIMIT_S)


def test_no_secret(monkeypatch, capsys):
    monkeypatch.delenv("GPUCOLL_SECRET", raising=False)
    with pytest.raises(AuthenticationError, match="no secret is set"):
        reach.listen("127.0.0.1:9", print, LIMIT_S)
    assert cli.main(["--listen", "127.0.0.1:9"]) == 1
    assert "no secret is set" in capsys.readouterr().out
