"""Connections inside TLS: what goes over them, and every other end that may not be there."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time

import pytest
from tests.certificates import Authority

from gpucoll import config
from gpucoll.errors import AuthenticationError
from gpucoll.transport.tcp.connection import SealedConnection
from gpucoll.transport.tcp.credentials import CertificateFiles, Credentials
from gpucoll.transport.tcp.handshake import ClosedEarlyError, Role, encode_purpose
from gpucoll.transport.tcp.tls import Tls, is_in_kernel

SECRET = b"0123456789abcdef"
PURPOSE = encode_purpose("a test")
MOST_BYTES = 1 << 26
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("certificates") / "theirs")


def files_of(authority, name="rank", **options):
    return CertificateFiles(*authority.environment(name, **options).values())


def tls_of(authority, name="rank", **options):
    return Tls(files_of(authority, name, **options))


def unchecked(files):
    """Return a rank's certificates though the others will refuse them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tls, "_check_own", lambda *_: b"")
        return Tls(files)


@pytest.fixture
def pair():
    """Makes both ends of a TCP connection: who connects, and who accepts."""
    with contextlib.ExitStack() as stack:

        def make() -> list[socket.socket]:
            with socket.create_server(("127.0.0.1", 0)) as listener:
                one = stack.enter_context(socket.create_connection(listener.getsockname()))
                two, _ = listener.accept()
                return [one, stack.enter_context(two)]

        yield make


@pytest.fixture
def connected(pair):
    """Makes two connections of ranks with these credentials."""
    made = []

    def make(connects: Tls | None, accepts: Tls | None, secrets=(SECRET, SECRET)):
        ends = zip(pair(), secrets, (connects, accepts), Role, strict=True)
        for end, secret, tls, role in ends:
            credentials = Credentials(secret, tls)
            made.append(SealedConnection(end, credentials, role, PURPOSE, MOST_BYTES))
        return made[-2:]

    yield make
    for connection in made:
        connection.close()


def step(connection):
    """Let one end do what it can, and close it where it fails; return what came, or the error."""
    try:
        connection.flush()
        return connection.receive()
    except (OSError, AuthenticationError) as error:
        connection.close()
        return error


def talk(connections):
    """Let both ends do what they can until each has a message, or an error; return those."""
    found = [None] * len(connections)
    stop = time.monotonic() + LIMIT_S
    while None in found:
        assert time.monotonic() < stop, found
        poll = select.poll()
        for place, connection in enumerate(connections):
            if found[place] is None:
                found[place] = step(connection)
            if connection.fileno() >= 0:
                events = connection.events if connection.is_sending else 0
                poll.register(connection, events | (select.POLLIN if found[place] is None else 0))
        if None in found:
            poll.poll(20)
    return found


def refusals(connections):
    """Return what each end says of the other one; every end fails."""
    connections[0].send(b"hello")
    found = talk(connections)
    assert all(isinstance(error, Exception) for error in found), found
    return [str(error) for error in found]


# --- what goes over them --------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 5, 100_000, 20_000_000])
def test_messages(connected, authority, size):
    tls = tls_of(authority)
    connections = connected(tls, tls)
    messages = [bytes([number]) * size for number in range(2)]
    for connection, message in zip(connections, messages, strict=True):
        connection.send(message)

    assert talk(connections) == messages[::-1]
    assert all(connection.is_known for connection in connections)
    assert connections[0].detach().version() == "TLSv1.3"
    assert not is_in_kernel(connections[0].detach())  # as far as any kernel is known here


def test_several_at_once_are_all_there(connected, authority):
    """A poll tells of what the kernel has, and not of what OpenSSL has taken from it."""
    tls = tls_of(authority)
    one, two = connected(tls, tls)
    for number in range(50):
        two.send(b"%d" % number)
    one.send(b"begin")
    assert talk([one, two]) == [b"0", b"begin"]

    found: list[bytes] = []
    poll = select.poll()
    poll.register(one, select.POLLIN)
    while len(found) < 49:
        if (message := one.receive()) is None:
            two.flush()
            assert poll.poll(1000 * LIMIT_S)
        else:
            found.append(message)
    assert found == [b"%d" % number for number in range(1, 50)]


def test_ranks_with_certificates_of_their_own(connected, authority):
    connections = connected(tls_of(authority, "one"), tls_of(authority, "two"))
    for connection in connections:
        connection.send(b"hello")

    assert talk(connections) == [b"hello"] * 2


def test_unsealed_bytes(connected, authority):
    tls = tls_of(authority)
    one, two = connected(tls, tls)
    one.send(b"hello")
    two.send(b"hello")
    talk([one, two])

    assert two.receive_unsealed(1) is None
    one.send_unsealed(b"x")
    stop = time.monotonic() + LIMIT_S
    while (came := two.receive_unsealed(1)) is None:
        assert time.monotonic() < stop
    assert came == b"x"
    one.close()
    while (came := two.receive_unsealed(1)) is None:
        assert time.monotonic() < stop
    assert came == b""


def test_in_pieces_of_one_byte(pair, authority):
    """Both ends stand at the ends of a relay that passes on one byte at a time."""
    tls = tls_of(authority)
    (one, left), (right, two) = pair(), pair()
    connections = [
        SealedConnection(end, Credentials(SECRET, tls), role, PURPOSE, MOST_BYTES)
        for end, role in ((one, Role.CONNECTS), (two, Role.ACCEPTS))
    ]
    for connection in connections:
        connection.send(b"hello")
    for end in (left, right):
        end.setblocking(False)
    found, stop = [None, None], time.monotonic() + LIMIT_S
    while None in found:
        assert time.monotonic() < stop
        for source, target in ((left, right), (right, left)):
            with contextlib.suppress(BlockingIOError):
                target.send(source.recv(1))
        for place, connection in enumerate(connections):
            found[place] = found[place] or step(connection)

    assert found == [b"hello"] * 2
    for connection in connections:
        connection.close()


# --- who may not be there -------------------------------------------------------------------------


def test_one_with_tls_and_one_without(connected, authority):
    tls = tls_of(authority)
    for ends in ((tls, None), (None, tls)):
        for text in refusals(connected(*ends)):
            assert all(name in text for name in (config.TLS_CERT, config.TLS_KEY, config.TLS_CA))
            assert "on every rank of the job, or on none" in text


def test_what_each_of_them_says(connected, authority):
    tls = tls_of(authority)
    client, server = refusals(connected(tls, None))
    assert client.startswith("speaks no TLS 1.3: it has no certificates")
    assert server.startswith("speaks TLS, but this rank has no certificates")

    client, server = refusals(connected(None, tls))
    assert client.startswith("answers in TLS, but this rank has no certificates")
    assert server.startswith("speaks without TLS, but this rank has certificates")


def test_another_secret(connected, authority):
    tls = tls_of(authority)
    found = refusals(connected(tls, tls, (SECRET, SECRET[::-1])))

    assert "another secret" in found[0]
    assert "does not know the job's secret" in found[1]


@pytest.mark.parametrize("stranger", Role)
def test_one_of_another_ca(connected, authority, other, stranger):
    """The stranger itself would take ours."""
    ours = tls_of(authority)
    theirs = unchecked(files_of(other, ca=authority))
    ends = (theirs, ours) if stranger is Role.CONNECTS else (ours, theirs)

    client, server = refusals(connected(*ends))

    assert "the CA" in client
    assert "the CA" in server
    said = (server, client) if stranger is Role.CONNECTS else (client, server)
    assert said[0].startswith("showed a certificate that this rank does not accept")
    assert said[1].startswith("refuses this rank's certificate")


@pytest.mark.parametrize("stranger", Role)
def test_one_that_has_expired(connected, authority, stranger):
    ours = tls_of(authority)
    theirs = unchecked(files_of(authority, "expired", days=-1))
    ends = (theirs, ours) if stranger is Role.CONNECTS else (ours, theirs)

    client, server = refusals(connected(*ends))

    said = (server, client) if stranger is Role.CONNECTS else (client, server)
    assert "certificate has expired: make a new one" in said[0]
    assert said[1].startswith("refuses this rank's certificate, as expired: compare the clocks")


def stranger_context(authority, protocol, *, shows=True, most=None):
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if shows:
        files = files_of(authority)
        context.load_cert_chain(files.certificate, files.key)
    if most:
        context.maximum_version = most
    return context


def meet_stranger(end, stranger_end, context, role):
    """Return what a rank says of somebody who speaks TLS by another context."""
    is_server = role is Role.CONNECTS
    stranger_end.setblocking(False)
    with context.wrap_socket(
        stranger_end, server_side=is_server, do_handshake_on_connect=False
    ) as stranger:
        stop = time.monotonic() + LIMIT_S
        while (found := step(end)) is None:
            assert time.monotonic() < stop
            with contextlib.suppress(OSError):
                stranger.do_handshake()
    return str(found)


def test_one_without_a_certificate(pair, authority):
    one, two = pair()
    end = SealedConnection(
        two, Credentials(SECRET, tls_of(authority)), Role.ACCEPTS, PURPOSE, MOST_BYTES
    )
    context = stranger_context(authority, ssl.PROTOCOL_TLS_CLIENT, shows=False)

    text = meet_stranger(end, one, context, Role.ACCEPTS)

    assert text.startswith("showed no certificate")
    assert config.TLS_CERT in text


@pytest.mark.parametrize("role", Role)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_one_of_tls_1_2(pair, authority, role):
    one, two = pair()
    mine, theirs = (one, two) if role is Role.CONNECTS else (two, one)
    end = SealedConnection(mine, Credentials(SECRET, tls_of(authority)), role, PURPOSE, MOST_BYTES)
    protocol = ssl.PROTOCOL_TLS_SERVER if role is Role.CONNECTS else ssl.PROTOCOL_TLS_CLIENT
    context = stranger_context(authority, protocol, most=ssl.TLSVersion.TLSv1_2)

    assert meet_stranger(end, theirs, context, role).startswith("speaks no TLS 1.3")


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\xff\xffrubbish", b"\0" * 99]
)
def test_rubbish(pair, authority, data):
    one, two = pair()
    end = SealedConnection(
        two, Credentials(SECRET, tls_of(authority)), Role.ACCEPTS, PURPOSE, MOST_BYTES
    )
    one.sendall(data)
    found, stop = None, time.monotonic() + LIMIT_S
    while found is None:
        assert time.monotonic() < stop
        found = step(end)

    assert isinstance(found, AuthenticationError), found
    assert not end.is_known


@pytest.mark.parametrize("role", Role)
def test_who_leaves_at_once(pair, authority, role):
    mine, theirs = pair()
    credentials = Credentials(SECRET, tls_of(authority))
    end = SealedConnection(mine, credentials, role, PURPOSE, MOST_BYTES)
    theirs.close()
    found, stop = None, time.monotonic() + LIMIT_S
    while found is None:
        assert time.monotonic() < stop
        found = step(end)

    assert isinstance(found, ClosedEarlyError | ConnectionError), found


def test_somebody_between_with_a_certificate_of_the_ca(pair, connected, authority):
    """It passes on all that two ranks say to each other: each sees its certificate, and refuses."""
    tls, between = tls_of(authority), tls_of(authority, "between")
    (one, left), (right, two) = pair(), pair()
    ranks = [
        SealedConnection(end, Credentials(SECRET, tls), role, PURPOSE, MOST_BYTES)
        for end, role in ((one, Role.CONNECTS), (two, Role.ACCEPTS))
    ]
    for end in (left, right):
        end.setblocking(False)
    relays = [between.socket(left, Role.ACCEPTS), between.socket(right, Role.CONNECTS)]
    ranks[0].send(b"hello")
    found, are_ready, stop = [None, None], False, time.monotonic() + LIMIT_S
    while None in found:
        assert time.monotonic() < stop
        for place, rank in enumerate(ranks):
            if found[place] is None:
                found[place] = step(rank)
                if found[place] is not None:
                    relays[place].close()
                    relays[1 - place].close()
        if any(found):
            continue
        for relay in relays if not are_ready else ():
            relay.proceed()
        are_ready = are_ready or (relays[0].proceed() and relays[1].proceed())
        for source, target in (relays, relays[::-1]) if are_ready else ():
            with contextlib.suppress(BlockingIOError):
                target.send(source.recv(4096))

    assert all(isinstance(error, OSError | AuthenticationError) for error in found), found
    assert "takes this connection for another one" in str(found[1])
    assert not any(rank.is_known for rank in ranks)


@pytest.mark.parametrize("at", [10, 2000, 60_000])
def test_a_byte_changed_on_the_way(pair, authority, at):
    tls = tls_of(authority)
    (one, left), (right, two) = pair(), pair()
    ranks = [
        SealedConnection(end, Credentials(SECRET, tls), role, PURPOSE, MOST_BYTES)
        for end, role in ((one, Role.CONNECTS), (two, Role.ACCEPTS))
    ]
    ranks[0].send(bytes(100_000))
    for end in (left, right):
        end.setblocking(False)
    passed, found, stop = 0, None, time.monotonic() + LIMIT_S
    while found is None:
        assert time.monotonic() < stop
        for source, target in ((left, right), (right, left)):
            with contextlib.suppress(OSError):
                data = bytearray(source.recv(1000))
                if source is left:
                    if passed <= at < passed + len(data):
                        data[at - passed] ^= 1
                    passed += len(data)
                target.send(data)
        step(ranks[0])
        found = step(ranks[1])
    for rank in ranks:
        rank.close()

    assert isinstance(found, AuthenticationError | ClosedEarlyError | ConnectionError), found


@pytest.mark.parametrize("size", [100, 1_000_000])
def test_what_was_recorded_says_nothing_a_second_time(pair, authority, size):
    """All that a rank has sent is sent again, to the same rank with the same certificates."""
    tls = tls_of(authority)
    (one, left), (right, two) = pair(), pair()
    ranks = [
        SealedConnection(end, Credentials(SECRET, tls), role, PURPOSE, MOST_BYTES)
        for end, role in ((one, Role.CONNECTS), (two, Role.ACCEPTS))
    ]
    message, recorded = bytes(size), bytearray()
    ranks[0].send(message)
    for end in (left, right):
        end.setblocking(False)
    came, stop = None, time.monotonic() + LIMIT_S
    while came is None:
        assert time.monotonic() < stop
        for source, target in ((left, right), (right, left)):
            with contextlib.suppress(BlockingIOError):
                data = source.recv(1000)
                recorded += data if source is left else b""
                target.sendall(data)
        step(ranks[0])
        came = step(ranks[1])
    assert came == message
    for rank in ranks:
        rank.close()

    stranger, end = pair()
    again = SealedConnection(end, Credentials(SECRET, tls), Role.ACCEPTS, PURPOSE, MOST_BYTES)
    stranger.sendall(recorded[:50_000])
    found = None
    while found is None:
        assert time.monotonic() < stop
        found = step(again)
    again.close()
    assert isinstance(found, OSError | AuthenticationError), found
    assert not again.is_known
