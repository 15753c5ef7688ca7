"""Where rank 0 listens: as the others learn it, from an address, a file or a store."""

from __future__ import annotations

import datetime
import errno
import json
import os
import socket
import time

import pytest
from tests.waiting import until

from gpucoll.errors import ArgumentError, ArgumentTypeError, AuthenticationError, RendezvousError
from gpucoll.rendezvous import meeting_points
from gpucoll.rendezvous.addresses import derived_port, join_address, split_address
from gpucoll.rendezvous.meet_argument import parse_meet
from gpucoll.rendezvous.meeting_file import FilePoint
from gpucoll.rendezvous.meeting_points import TcpPoint
from gpucoll.rendezvous.meeting_store import StorePoint, TorchrunPoint
from gpucoll.topology import interfaces


class TestWhatTheUserSays:
    @pytest.mark.parametrize(
        ("text", "host", "port"),
        [
            ("tcp://10.0.0.1:29500", "10.0.0.1", 29500),
            ("10.0.0.1:29500", "10.0.0.1", 29500),
            ("tcp://[::1]:1", "::1", 1),
            ("tcp://[fe80::1%eth0]:65535", "fe80::1%eth0", 65535),
            ("tcp://node-1.example.org:8080", "node-1.example.org", 8080),
        ],
    )
    def test_an_address(self, text, host, port):
        point = parse_meet(text)

        assert isinstance(point, TcpPoint)
        assert (point.host, point.port, point.leads_to()) == (host, port, host)
        assert point.secret() is None
        assert point.text == f"tcp://{join_address(host, port)}"
        assert point.numbered(3) == point

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("tcp://node", "'tcp://node': it has no port"),
            ("node", "'node': it has no port"),
            ("tcp://node:", "it has no port"),
            ("tcp://:80", "it names no host"),
            ("tcp://", "it names no host"),
            ("tcp://node:0", "a number from 1 to 65535, but is '0'"),
            ("tcp://node:65536", "but is '65536'"),
            ("tcp://node:http", "but is 'http'"),
            ("tcp://node:" + "9" * 5000, "but is '9999"),
            ("tcp://node:²", "but is '²'"),
            ("tcp://node:80/x", "but is '80/x'"),
            ("tcp://a/b:80", "is not a host name"),
            ("tcp://a b:80", "is not a host name"),
            ("tcp://::1:80", r"stand in brackets: \[fd00::1\]:29500"),
            ("tcp://[::1:80", "stand in brackets"),
            ("tcp://[::1]80", "stand in brackets"),
            ("tcp://0.0.0.0:80", "every interface"),
            ("tcp://[::]:80", "every interface"),
            ("http://node:80", "must be tcp://HOST:PORT .* or file:///PATH"),
            ("file://relative/x", "by its whole path"),
            ("file:///folder/", "by its whole path"),
        ],
    )
    def test_what_is_none(self, text, why):
        with pytest.raises(ArgumentError, match=f"(?s)GPUCOLL_MEET.*{why}"):
            parse_meet(text, where="GPUCOLL_MEET")

    @pytest.mark.parametrize("given", [3, b"tcp://a:1", {}, object()])
    def test_what_is_no_store(self, given):
        with pytest.raises(ArgumentTypeError, match=f"got {type(given).__name__}"):
            parse_meet(given)

    def test_addresses_as_text(self):
        for pair in [("a", 1), ("::1", 2), ("fe80::1%lo", 3)]:
            assert split_address(join_address(*pair)) == pair

    def test_ports_that_names_stand_for(self):
        ports = [derived_port(f"slurm:{job}.0") for job in range(1000)]

        assert derived_port("slurm:5.0") == ports[5]
        assert len({*ports}) > 950
        assert min(ports) > 10000
        assert max(ports) < 32768


class TestAddress:
    @pytest.fixture
    def names(self, monkeypatch):
        """What names resolve to; an error's number is raised."""
        known: dict[str, object] = {}

        def resolve(host):
            found = known.get(host, [host])
            if isinstance(found, int):
                raise socket.gaierror(found, "says the DNS")
            return found

        monkeypatch.setattr(interfaces, "numeric_addresses", resolve)
        monkeypatch.setattr(meeting_points, "_RESOLVE_AGAIN_S", 0.0)
        return known

    @pytest.fixture
    def clock(self, monkeypatch):
        now = [1000.0]
        monkeypatch.setattr(time, "monotonic", lambda: now[0])
        return now

    @pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
    def test_of_this_host(self, host):
        point = TcpPoint(host, 29500)
        address, port = point.listen_at()

        assert point.find() == join_address(address, port)
        point.publish("ignored")
        point.withdraw()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as end:
            end.bind((address, 0))

    def test_of_another_host(self):
        point = TcpPoint("203.0.113.7", 80)

        assert point.find() == "203.0.113.7:80"
        with pytest.raises(RendezvousError, match=r"cannot listen at tcp://203.0.113.7:80: 203"):
            point.listen_at()

    def test_forwarded_by_a_router(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_INTERFACES", "lo")

        assert TcpPoint("203.0.113.7", 80).listen_at() == ("127.0.0.1", 80)

    def test_each_of_several_addresses_gets_its_turn(self, names):
        names["node"] = ["203.0.113.7", "::1", "127.0.0.1"]
        point = TcpPoint("node", 80)

        assert [point.find() for _ in range(4)] == [
            *("203.0.113.7:80", "[::1]:80", "127.0.0.1:80", "203.0.113.7:80")
        ]
        assert point.listen_at()[0] in ("::1", "127.0.0.1")

    def test_a_hosts_own_name_for_its_loopback(self, names, monkeypatch):
        names["node"] = ["127.0.1.1"]
        monkeypatch.setattr(interfaces, "default_address", lambda: "127.0.0.5")
        assert TcpPoint("node", 80).listen_at() == ("127.0.0.5", 80)
        assert TcpPoint("node", 80).find() == "127.0.0.5:80"
        monkeypatch.setenv("GPUCOLL_INTERFACES", "127.0.0.9")
        assert TcpPoint("node", 80).listen_at() == ("127.0.0.9", 80)
        names["localhost"] = ["127.0.0.1"]
        assert TcpPoint("localhost", 80).listen_at() == ("127.0.0.1", 80)

    def test_a_name_that_does_not_resolve(self, names, clock):
        names["node"] = socket.EAI_NONAME
        point = TcpPoint("node", 80)
        with pytest.raises(
            RendezvousError, match=r"tcp://node:80 does not resolve on .*says the DN"
        ):
            point.listen_at()

        assert point.find() is None
        assert "does not resolve" in point.trouble
        clock[0] += 10
        assert point.find() is None  # a container that is only starting
        clock[0] += 15
        with pytest.raises(RendezvousError, match="put the name into the DNS or /etc/hosts"):
            point.find()

    def test_a_name_that_resolves_late(self, names, clock):
        names["node"] = socket.EAI_NONAME
        point = TcpPoint("node", 80)
        assert point.find() is None
        clock[0] += 10
        names["node"] = ["203.0.113.7"]
        assert (point.find(), point.trouble) == ("203.0.113.7:80", "")
        clock[0] += 100
        names["node"] = socket.EAI_AGAIN
        assert point.find() is None
        clock[0] += 100  # the name server is away: nobody's mistake
        assert point.find() is None


class TestFile:
    @pytest.fixture
    def path(self, tmp_path):
        return tmp_path / "meeting"

    @pytest.fixture
    def point(self, path):
        """Return one rank's point; each has its own."""
        return lambda name="", number=0: parse_meet(f"file://{path}", name).numbered(number)

    def test_the_others_read_what_rank_0_writes(self, point, path):
        host, guest = point(), point()
        assert (host.listen_at(), host.leads_to(), guest.find()) == (None, None, None)
        assert guest.trouble == ""
        secret = host.secret()
        host.publish("[fd00::1]:4711")

        assert path.stat().st_mode & 0o777 == 0o600
        assert os.listdir(path.parent) == ["meeting"]
        assert guest.find() == "[fd00::1]:4711"
        assert guest.leads_to() == "fd00::1"
        assert guest.secret() == secret
        assert len(secret) == 32
        assert point().secret() != secret  # another job's
        host.withdraw()
        assert os.listdir(path.parent) == []
        assert guest.find() is None
        host.withdraw()

    def test_without_a_secret(self, point):
        point().publish("a:1")
        guest = point()

        assert (guest.find(), guest.secret()) == ("a:1", None)

    def test_permissions_whatever_the_umask(self, point, path):
        before = os.umask(0)
        try:
            point().publish("a:1")
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o600

    def test_a_later_meetings_file_is_not_an_earlier_ones(self, point):
        point(number=0).publish("a:1")
        guest = point(number=1)

        assert guest.find() is None
        assert "is of the meeting '#0', and this one is '#1'" in guest.trouble
        assert guest.secret() is not None

    def test_names_have_files_of_their_own(self, point, path):
        names = ["", "evens", "odds", "a/b", "../x", "ä" * 200]
        points = [point(name) for name in names]
        for number, one in enumerate(points):
            one.publish(f"a:{number + 1}")

        assert [point(name).find() for name in names] == [f"a:{n + 1}" for n in range(len(names))]
        assert {*os.listdir(path.parent)} > {"meeting", "meeting.evens", "meeting.odds"}
        for one in points:
            one.withdraw()
        assert os.listdir(path.parent) == []

    def test_what_a_killed_job_left_is_replaced(self, point, path):
        point().publish("a:1")
        host = point()
        host.publish("b:2")
        guest = point()

        assert guest.find() == "b:2"
        host.withdraw()
        assert not path.exists()

    def test_another_jobs_file_is_left_alone(self, point):
        first, second = point(), point()
        first.publish("a:1")
        second.publish("b:2")
        first.withdraw()

        assert point().find() == "b:2"

    @pytest.mark.parametrize("content", ["", "rubbish", "[]", "{}", "3", '{"meeting": "#0"}'])
    def test_rubbish(self, point, path, content):
        path.write_text(content)
        path.chmod(0o600)
        guest = point()

        assert guest.find() is None
        assert "has no address of rank 0 in it" in guest.trouble

    @pytest.mark.parametrize("field", ["address", "secret"])
    @pytest.mark.parametrize("value", [3, "no address at all", {}])
    def test_a_wrong_field(self, point, path, field, value):
        content = {"meeting": "#0", "address": "a:1", "secret": None, field: value}
        path.write_text(json.dumps(content))
        path.chmod(0o600)
        guest = point()

        assert guest.find() is None
        assert "has no address of rank 0 in it" in guest.trouble

    @pytest.mark.parametrize("mode", [0o620, 0o602, 0o640, 0o604])
    def test_one_that_others_can_read_or_write(self, point, path, mode):
        point().publish("a:1")
        path.chmod(mode)
        with pytest.raises(AuthenticationError, match=rf"open to other users \(mode {mode:o}, not"):
            point().find()

    def test_another_users(self, point, monkeypatch):
        point().publish("a:1")
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(AuthenticationError, match=r"belongs to user \d+, and this process to"):
            point().find()

    def test_a_link(self, point, path):
        target = path.with_name("target")
        target.write_text("{}")
        path.symlink_to(target)
        with pytest.raises(AuthenticationError, match="is a symbolic link"):
            point().find()
        point().publish("a:1")  # takes the link's place
        assert target.read_text() == "{}"
        assert point().find() == "a:1"

    def test_what_is_no_file(self, point, path):
        os.mkfifo(path, 0o600)
        with pytest.raises(AuthenticationError, match="is no regular file"):
            point().find()

    def test_no_such_folder(self, tmp_path):
        point = FilePoint(str(tmp_path / "none" / "meeting"))
        with pytest.raises(RendezvousError, match="rank 0 cannot write the meeting point file:///"):
            point.publish("a:1")
        assert point.find() is None
        assert point.trouble.endswith("has no folder here")

    def test_a_file_server_that_is_away(self, point, monkeypatch):
        def away(*_):
            raise OSError(errno.EIO, "Input/output error")

        guest = point()
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", away)
            assert guest.find() is None
        assert "cannot be read here: Input/output error" in guest.trouble


class Store:
    """The least that a store has."""

    def __init__(self, values=None):
        self.values = {} if values is None else values

    def set(self, key, value):
        self.values[key] = value

    def get(self, key):
        return self.values[key]


class StoreWithCheck(Store):
    def get(self, key):
        assert key in self.values, "would block"
        return self.values[key].encode()

    def check(self, keys):
        return all(key in self.values for key in keys)

    def delete_key(self, key):
        return self.values.pop(key, None) is not None


class StoreWithWait(Store):
    def get(self, key):
        assert key in self.values, "would block"
        return self.values[key]

    def wait(self, keys, timeout):
        assert timeout < datetime.timedelta(seconds=1)
        if not all(key in self.values for key in keys):
            raise RuntimeError("the time is over")


class StoreOfNone(Store):
    def get(self, key):
        return self.values.get(key)


class StoreThatWaitsAsLongAsItLikes(StoreOfNone):
    def wait(self, keys):
        raise AssertionError("would block")


class TestStore:
    KINDS = (*(Store, StoreWithCheck, StoreWithWait, StoreOfNone), StoreThatWaitsAsLongAsItLikes)

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_others_read_what_rank_0_sets(self, kind):
        store = kind()
        host, guest = parse_meet(store, "a"), parse_meet(kind(store.values), "a")
        assert (host.listen_at(), guest.find(), guest.leads_to()) == (None, None, None)
        host.publish("[fd00::1]:4711")

        assert store.values == {"gpucoll/a#0/address": "[fd00::1]:4711"}
        assert (guest.find(), guest.leads_to()) == ("[fd00::1]:4711", "fd00::1")
        assert guest.secret() is None
        assert guest.numbered(1).find() is None
        assert parse_meet(store, "b").find() is None
        host.withdraw()
        assert (guest.find(), guest.trouble) == (None, "")

    def test_a_store_that_is_gone(self):
        class Gone(Store):
            def get(self, key):
                raise ConnectionError("broken\npipe")

            def set(self, key, value):
                raise ConnectionError("broken")

        point = parse_meet(Gone())
        assert point.find() is None
        assert point.trouble == "the store Gone cannot be asked: ConnectionError: broken"
        point.withdraw()
        with pytest.raises(RendezvousError, match=r"key 'gpucoll/#0/address' of .* cannot be set"):
            point.publish("a:1")

    @pytest.mark.parametrize("value", ["no address", b"\xff\xfe"])
    def test_what_is_no_address(self, value):
        store = Store({"gpucoll/#0/address": value})
        point = parse_meet(store)

        assert point.find() is None
        assert "the key 'gpucoll/#0/address' of the store Store is" in point.trouble


class TestTorch:
    """With torch's own stores."""

    @pytest.fixture
    def distributed(self):
        torch = pytest.importorskip("torch", reason="PyTorch is not installed")
        return torch.distributed

    @pytest.fixture
    def server(self, distributed):
        return distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def test_tcp_store(self, server, distributed):
        other = distributed.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
        host, guest = parse_meet(server, "a"), parse_meet(other, "a")
        assert guest.text == f"torch's TCPStore at 127.0.0.1:{server.port}"
        assert (guest.find(), guest.leads_to()) == (None, None)
        host.publish("a:1")
        until(lambda: guest.find() == "a:1")  # torch's clients do not wait for their server
        host.withdraw()
        until(lambda: guest.find() is None)
        assert guest.trouble == ""

    def test_other_stores(self, distributed, tmp_path):
        path = str(tmp_path / "store")
        stores = [distributed.FileStore(path, 2), distributed.HashStore()]
        stores.append(distributed.PrefixStore("x", distributed.HashStore()))
        for store in stores:
            point = StorePoint(store)
            assert point.find() is None
            point.publish("a:1")
            assert point.find() == "a:1"
            point.withdraw()
            assert (point.find(), point.trouble) == (None, "")

    def test_torchruns_store(self, server):
        host, guest = (TorchrunPoint("127.0.0.1", server.port, "a") for _ in range(2))
        later = TorchrunPoint("127.0.0.1", server.port, "a", attempt="1")
        assert (guest.find(), guest.trouble, guest.leads_to()) == (None, "", None)
        assert TorchrunPoint("203.0.113.7", 80).leads_to() == "203.0.113.7"
        host.publish("a:1")
        assert guest.find() == "a:1"
        assert later.find() is None
        assert guest.numbered(1).find() is None
        host.withdraw()
        assert guest.find() is None

    def test_no_store_there(self, distributed, monkeypatch):
        monkeypatch.setattr(
            "gpucoll.rendezvous.meeting_store._CONNECT", datetime.timedelta(milliseconds=200)
        )
        with socket.socket() as end:  # bound, and nobody listens
            end.bind(("127.0.0.1", 0))
            point = TorchrunPoint("127.0.0.1", end.getsockname()[1])
            assert point.find() is None
        assert "torchrun's store at 127.0.0.1:" in point.trouble
