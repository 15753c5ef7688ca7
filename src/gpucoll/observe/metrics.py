"""``gpucoll metrics``: numbers about the jobs of this host, for Prometheus."""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from gpucoll.command_line import OneLineParser, seconds_between
from gpucoll.observe.counters import DURATION_BOUNDS_NS, METRICS, Durations, Sample
from gpucoll.observe.follow import READ_S, Follower
from gpucoll.observe.processes import ancestors_of, pids_here
from gpucoll.version import __version__

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

__all__ = ["main", "make_parser", "registry_of"]

EXIT_USAGE, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130
FILE_NAME = "gpucoll.prom"
INTERVAL_S = 5.0
_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

DESCRIPTION = """\
Export numbers about the jobs of this user on this host to Prometheus; for root, of all users. One
exporter a host is enough: it runs beside the jobs, and follows them as they start and end. Their
ranks note their calls for it as long as it runs: each call reads the clock twice.
"""
EPILOG = """\
exit code: 0 after SIGTERM or with --once, 130 after Ctrl-C, 1 if the file cannot be written or the
port not be used, 2 if the command line is wrong or prometheus-client is not installed.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll metrics",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pid",
        nargs="*",
        type=int,
        metavar="PID",
        help="only jobs of these processes, or of launchers (default: all jobs)",
    )
    parser.add_argument(
        "--textfile",
        type=Path,
        metavar="DIR",
        help=f"write {FILE_NAME} into this folder, for node_exporter's textfile collector",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="answer Prometheus at this address, such as 127.0.0.1:9400",
    )
    parser.add_argument(
        "--interval",
        type=seconds_between(0.1, 3600),
        default=INTERVAL_S,
        metavar="S",
        help="look for jobs, and write the file, every so many seconds (default: %(default)g)",
    )
    parser.add_argument(
        "--once",
        action="store_true",
        help="watch for one interval, write the file or print, and end",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if given.listen is not None and given.once:
        parser.error("--once writes a file or prints; it cannot be used with --listen")
    if given.listen is None and given.textfile is None and not given.once:
        parser.error("nowhere to export to: give --textfile DIR or --listen HOST:PORT")
    if given.textfile is not None and not given.textfile.is_dir():
        parser.error(f"argument --textfile: {given.textfile} is no folder")
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        parser.error("prometheus-client is not installed: pip install 'gpucoll[observe]'")
    try:
        with _signals() as ends:
            return _export(given, ends)
    except BrokenPipeError:  # | head
        raise
    except OSError as error:
        print(f"gpucoll metrics: {error}", file=sys.stderr)
        return EXIT_FAILED


def _export(given: argparse.Namespace, ends: socket.socket) -> int:
    follower = Follower(lambda: _pids_of(given.pid))
    registry = registry_of(follower)
    with contextlib.ExitStack() as stack:
        stack.callback(follower.close)
        write: Callable[[], None] = partial(_print, registry)
        if given.textfile is not None:
            write = stack.enter_context(_textfile(given.textfile, registry, given.once))
        follower.look()
        if given.listen is not None:
            stack.enter_context(_server(given.listen, registry))
        told: set[str] = set()
        while True:
            if given.textfile is not None and not given.once:
                write()
            told = _tell(follower, told)
            ended = _wait(given.interval, follower, ends)
            if ended is not None:
                return EXIT_INTERRUPTED if ended == signal.SIGINT else 0
            follower.look()
            if given.once:
                write()
                return 0


@contextlib.contextmanager
def _signals() -> Iterator[socket.socket]:
    """Give a socket that has a byte for each signal that is to end the command.

    A signal interrupts nothing: not the writing of a file either.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        taken = [each for each in _ENDS if signal.getsignal(each) != signal.SIG_IGN]  # nohup
        before = [(each, signal.signal(each, lambda *_: None)) for each in taken]
        waker = signal.set_wakeup_fd(theirs.fileno())
        try:
            yield ours
        finally:
            signal.set_wakeup_fd(waker)
            for each, handler in before:
                signal.signal(each, signal.SIG_DFL if handler is None else handler)


def _wait(interval_s: float, follower: Follower, ends: socket.socket) -> int | None:
    """Read calls for a while; return the signal that is to end this, if one comes."""
    end_s = time.monotonic() + interval_s
    while (left_s := end_s - time.monotonic()) > 0:
        ready, _, _ = select.select([ends], [], [], min(left_s, READ_S))
        if ready:
            return ends.recv(1)[0]
        follower.read()
    return None


def _pids_of(wanted: Sequence[int]) -> list[int]:
    """Return the processes whose jobs are meant."""
    pids = pids_here()
    return [pid for pid in pids if {*wanted} & {*ancestors_of(pid)}] if wanted else pids


def _tell(follower: Follower, told: set[str]) -> set[str]:
    """Tell of processes that cannot be read, each reason once; return what has been told."""
    for pid, text in follower.unreadable.items():
        if text not in told:
            print(f"gpucoll metrics: process {pid} cannot be read: {text}", file=sys.stderr)
    return told | {*follower.unreadable.values()}


# --- Prometheus -----------------------------------------------------------------------------------


class _Collector:
    """Gives the values of a follower to prometheus-client."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def collect(self) -> Iterator[object]:
        """Yield each metric, with its values."""
        from prometheus_client import core

        families = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        by_metric: dict[str, list[Sample]] = {name: [] for name in METRICS}
        for sample in self._follower.samples:
            by_metric[sample.metric.name].append(sample)
        for name, samples in by_metric.items():
            metric = METRICS[name]
            family = families[metric.kind](name, metric.text, labels=("job_id", *metric.labels))
            for sample in samples:
                if isinstance(sample.value, Durations):
                    buckets, seconds = _buckets(sample.value), sample.value.seconds
                    family.add_metric(sample.labels, buckets, seconds)
                else:
                    family.add_metric(sample.labels, sample.value)
            yield family
        build = core.GaugeMetricFamily("gpucoll_build_info", BUILD_INFO, labels=("version",))
        build.add_metric((__version__,), 1)
        yield build


BUILD_INFO = "1; the version of the exporter."


def _buckets(durations: Durations) -> list[tuple[str, float]]:
    """Return the buckets of a histogram, by their upper bounds in seconds, cumulated."""
    bounds = [*(repr(bound / 1e9) for bound in DURATION_BOUNDS_NS.tolist()), "+Inf"]
    return list(zip(bounds, map(float, durations.counts.cumsum().tolist()), strict=True))


def registry_of(follower: Follower) -> CollectorRegistry:
    """Return what prometheus-client exports: the values of a follower."""
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(follower))  # type: ignore[arg-type]
    return registry


def _print(registry: CollectorRegistry) -> None:
    from prometheus_client import generate_latest

    print(generate_latest(registry).decode(), end="")


@contextlib.contextmanager
def _textfile(
    folder: Path, registry: CollectorRegistry, stays: bool
) -> Iterator[Callable[[], None]]:
    """Give a function that writes the file; remove it at the end, unless it stays.

    node_exporter would go on to export the values of a file that nobody writes any more.
    """
    from prometheus_client import write_to_textfile

    path = folder / FILE_NAME
    try:
        yield lambda: write_to_textfile(str(path), registry)
    finally:
        if not stays:
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _server(address: tuple[str, int], registry: CollectorRegistry) -> Iterator[None]:
    """Answer HTTP requests at an address within the block."""
    from prometheus_client import start_http_server

    host, port = address
    if not _is_loopback(host):
        print(
            f"gpucoll metrics: warning: {host} is no loopback address, and there is no "
            "authentication: whoever reaches this port can read the metrics",
            file=sys.stderr,
        )
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise OSError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    shown = f"[{host}]" if ":" in host else host
    # The port is not the given one if that is 0: the kernel has chosen it.
    print(f"gpucoll metrics: http://{shown}:{server.server_port}/metrics", file=sys.stderr)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError:
        return True  # listening fails, and says so
    return all(ipaddress.ip_address(str(each[4][0])).is_loopback for each in found)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(
            f"HOST:PORT expected, such as 127.0.0.1:9400; got {text!r}"
        )
    return host.strip("[]"), int(port)
