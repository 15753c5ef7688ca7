"""Network interfaces: with the loopback, which every host has, and what is made up."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpucoll.errors import ArgumentError, RendezvousError
from gpucoll.topology import interfaces
from gpucoll.topology.interfaces import (
    Interface,
    addresses_of,
    chosen_addresses,
    default_address,
    interface_of,
    is_local,
    local_address_towards,
    means_loopback,
    numeric_addresses,
    own_address,
    reachable_addresses,
)

LINK_LOCAL = "fe80::5%eth2"
HAS_IPV6 = Path("/proc/net/if_inet6").exists() and "::1" in addresses_of("lo")
needs_ipv6 = pytest.mark.skipif(not HAS_IPV6, reason="the loopback has no IPv6 address here")

IN_A_NAMESPACE = """\
import fcntl, socket, struct
from gpucoll.topology.interfaces import addresses_of, default_address, interface_of
print(addresses_of("lo"), default_address())
end = socket.socket()
def ask(number, value, name=b"lo"):
    fcntl.ioctl(end, number, struct.pack("16s24s", name, value))
def ipv4(*address):
    return struct.pack("=H2x4s", socket.AF_INET, bytes(address))
ask(0x8914, struct.pack("h", 0x41))  # SIOCSIFFLAGS: up
ask(0x8922, struct.pack("i", 9000))  # SIOCSIFMTU
ask(0x8916, ipv4(10, 1, 2, 3))  # SIOCSIFADDR
ask(0x8916, ipv4(10, 1, 2, 4), b"lo:1")
end.close()
print([a for a in addresses_of("lo") if ":" not in a], interface_of("10.1.2.4"))
"""


class TestOfThisHost:
    def test_the_loopback(self):
        assert addresses_of("lo")[0] == "127.0.0.1"
        assert interface_of("127.0.0.1").name == "lo"
        assert interface_of("127.0.0.1").mtu > 1000

    @pytest.mark.parametrize("address", ["127.3.2.1", pytest.param("::1", marks=needs_ipv6)])
    def test_all_that_is_the_loopbacks(self, address):
        assert interface_of(address) == interface_of("127.0.0.1")
        assert is_local(address)

    @pytest.mark.parametrize("address", ["203.0.113.7", "2001:db8::7"])
    def test_addresses_of_others(self, address):
        assert not is_local(address)
        with pytest.raises(ArgumentError, match=rf"address {address}: there are .*lo \(127.0.0.1"):
            interface_of(address)

    def test_an_interface_that_is_not_there(self):
        with pytest.raises(
            ArgumentError, match=r"no network interface 'eth99': there are .*lo \(1"
        ):
            addresses_of("eth99")
        with pytest.raises(OSError, match="No such device"):
            interfaces.mtu_of("eth99")

    def test_every_interface_has_its_own_addresses(self):
        for _, name in socket.if_nameindex():
            for address in addresses_of(name):
                assert interface_of(address).name == name
                assert is_local(address)

    def test_in_a_namespace_of_its_own(self):
        """What /sys says is another namespace's there."""
        path = str(Path(interfaces.__file__).parent.parent.parent)
        done = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", IN_A_NAMESPACE],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": path},
        )
        if "unshare" in done.stderr:
            pytest.skip("no namespaces here: neither as root nor for users")
        assert done.stderr == ""
        assert done.stdout.splitlines() == [
            "[] 127.0.0.1",
            "['10.1.2.3', '10.1.2.4'] Interface(name='lo', mtu=9000)",
        ]

    def test_ipv6_as_the_kernel_writes_it(self, monkeypatch):
        lines = (
            "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
            "20010db8000000000000000000000002 04 40 00 80     eth0\n"
            "20010db8000000000000000000000003 04 40 00 c0     eth0\n"  # not yet known to be free
            "20010db8000000000000000000000004 04 40 00 88     eth0\n"  # another host has it
            "00000000000000000000000000000001 01 80 10 80       lo\n"
        )
        monkeypatch.setattr(Path, "read_text", lambda path: lines)

        assert interfaces._ipv6() == {
            "eth0": ["2001:db8::2", "fe80::fc:ff:fe00:1%eth0"],
            "lo": ["::1"],
        }


class TestChosen:
    @pytest.fixture
    def choose(self, monkeypatch):
        def choose(text, family=None):
            monkeypatch.setenv("GPUCOLL_INTERFACES", text)
            return chosen_addresses(family)

        return choose

    def test_nothing(self, monkeypatch, choose):
        monkeypatch.delenv("GPUCOLL_INTERFACES", raising=False)
        assert chosen_addresses() == []
        assert choose("") == []
        assert choose(" , ") == []

    def test_interfaces_and_addresses(self, choose):
        assert choose("lo") == ["127.0.0.1"]
        assert choose(" lo, 127.0.0.7,") == ["127.0.0.1", "127.0.0.7"]
        assert choose("lo", socket.AF_INET) == ["127.0.0.1"]

    @needs_ipv6
    def test_ipv6(self, choose):
        assert choose("lo", socket.AF_INET6) == ["::1"]
        assert choose("::1") == ["::1"]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("eth99", "names 'eth99': this host has no network interface 'eth99': there are"),
            ("lo,eth99", "names 'eth99'"),
            ("203.0.113.7", "names '203.0.113.7', which is no address of this host: there are"),
        ],
    )
    def test_what_is_not_there(self, choose, text, why):
        with pytest.raises(ArgumentError, match=rf"GPUCOLL_INTERFACES {why}"):
            choose(text)

    def test_a_link_local_address_where_there_are_others(self, choose, monkeypatch):
        known = {"eth0": ["10.0.0.1", "fe80::1%eth0"], "eth1": ["fd00::1", "fe80::2%eth1"]}
        monkeypatch.setattr(interfaces, "interface_names", lambda: [*known, "eth2"])
        monkeypatch.setattr(interfaces, "addresses_of", lambda name: known.get(name, [LINK_LOCAL]))
        assert choose("eth1,eth2", socket.AF_INET6) == ["fd00::1", LINK_LOCAL]
        with pytest.raises(ArgumentError, match="'eth0', which has no IPv6 address"):
            choose("eth1,eth0", socket.AF_INET6)

        monkeypatch.setattr(interfaces, "numeric_addresses", lambda host: ["fd00::9", "10.0.0.9"])
        monkeypatch.setenv("GPUCOLL_INTERFACES", "eth0")
        assert own_address("node") == "10.0.0.1"  # of IPv4, by which others can come

    def test_the_other_family(self, choose):
        with pytest.raises(ArgumentError, match=r"127.0.0.1', which has no IPv6 address: there"):
            choose("127.0.0.1", socket.AF_INET6)


class TestTowards:
    @pytest.mark.parametrize(
        "host", ["127.0.0.1", "localhost", pytest.param("::1", marks=needs_ipv6)]
    )
    def test_this_host(self, host):
        assert local_address_towards(host) in ("127.0.0.1", "::1")
        assert numeric_addresses(host)[0] in ("127.0.0.1", "::1")

    def test_its_own_addresses(self):
        address = default_address()

        assert is_local(address)
        assert local_address_towards(address) == address
        assert isinstance(interface_of(address), Interface)

    @pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b", "x" * 70 + ".invalid"])
    def test_a_name_that_does_not_resolve(self, host):
        with pytest.raises(RendezvousError, match=f"{re.escape(repr(host))} does not resolve: "):
            local_address_towards(host)

    def test_nowhere(self, monkeypatch):
        def refuse(family, place):
            raise OSError(101, "Network is unreachable")

        monkeypatch.setattr(interfaces, "_towards", refuse)
        with pytest.raises(RendezvousError, match=r"to 203.0.113.7: Network is unreachable; there"):
            local_address_towards("203.0.113.7")
        assert default_address() == "127.0.0.1"

    @pytest.fixture
    def own_name(self, monkeypatch):
        """A name that this host's own /etc/hosts has for its loopback."""
        known = {"node": ["127.0.1.1"]}
        monkeypatch.setattr(interfaces, "numeric_addresses", lambda host: known.get(host, [host]))
        monkeypatch.setattr(interfaces, "default_address", lambda: "127.0.0.5")
        return "node"

    def test_a_hosts_own_name(self, own_name, monkeypatch):
        monkeypatch.setattr(interfaces, "_towards", lambda family, place: f"from {place[0]}")
        assert reachable_addresses(own_name) == ["127.0.0.5"]
        assert own_address(own_name) == local_address_towards(own_name) == "from 127.0.0.5"
        assert reachable_addresses("127.0.0.1") == ["127.0.0.1"]
        monkeypatch.setenv("GPUCOLL_INTERFACES", "127.0.0.9")
        assert reachable_addresses(own_name) == ["127.0.0.9"]

    def test_link_local_addresses_of_a_name(self, monkeypatch):
        known = {"node": [LINK_LOCAL, "10.0.0.1"], "alone": [LINK_LOCAL]}
        monkeypatch.setattr(interfaces, "numeric_addresses", lambda host: known.get(host, [host]))
        monkeypatch.setattr(interfaces, "_towards", lambda family, place: f"from {place[0]}")
        assert reachable_addresses("node") == ["10.0.0.1"]
        assert own_address("node") == "from 10.0.0.1"
        for host in ("alone", "fe80::1"):
            with pytest.raises(RendezvousError, match="link-local address of IPv6"):
                own_address(host)

    def test_what_is_plainly_the_loopback(self):
        assert all(map(means_loopback, ["localhost", "a.localhost", "127.0.0.1", "::1"]))
        assert not any(map(means_loopback, ["node", "localhost.example.org", "10.0.0.1", "::2"]))

    def test_where_others_reach_this_host(self, monkeypatch):
        assert own_address() == default_address()
        assert own_address("127.0.0.1") == "127.0.0.1"
        monkeypatch.setenv("GPUCOLL_INTERFACES", "127.0.0.9,lo")
        assert own_address() == own_address("127.0.0.1") == "127.0.0.9"
        assert own_address("::2") == "127.0.0.9"  # rather another family than another interface

    @needs_ipv6
    def test_of_the_family_of_the_others(self, monkeypatch):
        monkeypatch.setenv("GPUCOLL_INTERFACES", "lo")
        assert own_address("::2") == "::1"
        assert own_address("127.0.0.2") == own_address() == "127.0.0.1"
