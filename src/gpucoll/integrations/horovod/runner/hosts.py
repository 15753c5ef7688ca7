"""The hosts of a job, as ``horovodrun`` is told them."""

from __future__ import annotations

import re
import socket
from pathlib import Path

__all__ = ["hosts_in_file", "hosts_of", "is_local", "parsed_hosts"]

_HOST = re.compile(r"[\w.-]+:[0-9]+")


def parsed_hosts(text: str) -> dict[str, int]:
    """Return the slots of each host of ``host1:2,host2:4``.

    Raises
    ------
    ValueError
        It has another form.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(_HOST.fullmatch(word) for word in words):
        raise ValueError(
            "Invalid host input, please make sure it has format as : worker-0:2,worker-1:2. "
            f"Got {text!r}"
        )
    pairs = (word.rpartition(":") for word in words)
    return {name: int(slots) for name, _, slots in pairs}


def hosts_in_file(path: str) -> dict[str, int]:
    """Return the slots of each host of a file with lines ``host slots=2``.

    Raises
    ------
    ValueError
        A line has another form.
    """
    found = {}
    for line in Path(path).read_text("utf-8").splitlines():
        name, *words = line.partition("#")[0].split() or [""]
        if not name:
            continue
        slots = dict(word.partition("=")[::2] for word in words).get("slots", "")
        if not slots.isdecimal():
            raise ValueError(f"{path}: a line is HOST slots=N; got {line!r}")
        found[name] = int(slots)
    return found


def hosts_of(hosts: str | None, hostfile: str | None, num_proc: int = 1) -> dict[str, int]:
    """Return the slots of each host; this host's if none is named."""
    if hosts:
        return parsed_hosts(hosts)
    return hosts_in_file(hostfile) if hostfile else {"localhost": num_proc}


def is_local(name: str) -> bool:
    """Return whether a name or address is that of this host."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]) or name.startswith("127."):
        return True
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(_is_bindable(family, address) for family, *_, address in found)


def _is_bindable(family: int, address: object) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)  # type: ignore[arg-type]  # what getaddrinfo returned
        except OSError:
            return False
    return True
