"""``gpucoll top``: a live table of the ranks of a running job."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence

from gpucoll.command_line import OneLineParser, at_least_one, seconds_between
from gpucoll.observe.sampler import Sampler, Snapshot
from gpucoll.observe.table import COLUMNS, plain_lines
from gpucoll.observe.why import EXIT_NONE, none_text, tell_unreadable

__all__ = ["main", "make_parser"]

_TICK_S = 1.0
"""Ranks note their calls for 3 s after a look, so looks are not further apart than this."""
_FIRST_S = 0.3
EXIT_INTERRUPTED = 130

DESCRIPTION = """\
Show what the ranks of a running job do, again and again: how many calls they make, for how long
they wait in them, and which rank makes the others wait. Looks at the job of this user on this host
with the most ranks. While this command looks, the ranks note the times of their calls.
"""
EPILOG = """\
keys: s and < sort by the next and the previous column, r reverses, p pauses, the arrows and Enter
show one rank, Esc goes back, q quits.

exit code: 0 at the end of the job, 2 if there is no job or the command line is wrong.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command's arguments."""
    parser = OneLineParser(
        prog="gpucoll top",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "pid",
        nargs="?",
        type=int,
        metavar="PID",
        help="a process of the job, or of its launcher (default: the job with the most ranks)",
    )
    parser.add_argument(
        "--interval",
        type=seconds_between(0.1, 3600),
        default=1.0,
        metavar="S",
        help="seconds between two tables, over which they are averaged (default: %(default)g)",
    )
    parser.add_argument("--count", type=at_least_one, metavar="N", help="end after N tables")
    parser.add_argument(
        "--plain", action="store_true", help="print plain text, as into pipes and files"
    )
    parser.add_argument(
        "--sort",
        choices=[*COLUMNS],
        default="rank",
        help="the column by which ranks are sorted: amounts downwards (default: %(default)s)",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    given = make_parser().parse_args(arguments)
    is_plain = given.plain or not sys.stdout.isatty()
    if not is_plain:
        try:
            import rich.live  # noqa: F401
        except ImportError:
            what = "the screen needs rich: pip install 'gpucoll[observe]'"
            print(f"gpucoll top: {what}", file=sys.stderr)
            is_plain = True
    try:
        with Sampler(given.pid, given.interval) as sampler:
            if sampler.has_ended:
                tell_unreadable("gpucoll top", sampler.unreadable, given.pid)
                what = sampler.trouble or none_text(given.pid)
                print(f"gpucoll top: {what}", file=sys.stderr)
                return EXIT_NONE
            has_ended = (_print if is_plain else _show)(sampler, given)
            if sampler.trouble:
                print(f"gpucoll top: {sampler.trouble}", file=sys.stderr)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    if has_ended:
        print("gpucoll top: the job has ended", file=sys.stderr)
    return 0


class _Clock:
    """When to look, and when to show."""

    def __init__(self, sampler: Sampler, interval_s: float, first_s: float) -> None:
        self._sampler, self._interval_s = sampler, interval_s
        now_s = time.monotonic()
        self._look_s = now_s + min(first_s, _TICK_S)
        self._show_s = now_s + first_s

    @property
    def left_s(self) -> float:
        """The time until the next look."""
        return max(self._look_s - time.monotonic(), 0.0)

    def tick(self) -> Snapshot | None:
        """Look if it is time; return what to show, if that is to change."""
        now_s = time.monotonic()
        if now_s < self._look_s:
            return None
        self._sampler.find()
        if self._sampler.has_ended:
            return None
        self._sampler.sample()
        is_due = now_s >= self._show_s
        if is_due:
            self._show_s = max(self._show_s + self._interval_s, now_s)
        self._look_s = min(now_s + _TICK_S, self._show_s)
        return self._sampler.snapshot(self._interval_s) if is_due else None


def _print(sampler: Sampler, given: argparse.Namespace) -> bool:
    """Print tables; return whether the job has ended."""
    clock, printed = _Clock(sampler, given.interval, given.interval), 0
    while given.count is None or printed < given.count:
        time.sleep(clock.left_s)
        shown = clock.tick()
        if sampler.has_ended:
            return True
        if shown is not None:
            at = time.strftime("%Y-%m-%d %H:%M:%S")
            blank = "\n" if printed else ""
            print(blank + "\n".join(plain_lines(shown, given.sort, at)), flush=True)
            printed += 1
    return False


def _show(sampler: Sampler, given: argparse.Namespace) -> bool:
    """Show the screen until the user leaves it; return whether the job has ended."""
    from rich.console import Console
    from rich.live import Live

    from gpucoll.observe.screen import Keyboard, View

    console, view = Console(highlight=False), View(given.sort)
    clock, count = _Clock(sampler, given.interval, min(_FIRST_S, given.interval)), 0
    shown: Snapshot | None = None
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while given.count is None or count < given.count:
            for key in keyboard.keys(clock.left_s):
                if key == "suspend":
                    live.stop()
                    keyboard.leave()
                    os.kill(os.getpid(), signal.SIGSTOP)
                    keyboard.enter()
                    live.start()
                elif not view.press(key):
                    return False
            found = clock.tick()
            if sampler.has_ended:
                return True
            if found is not None and not view.is_paused:
                shown = found
                count += 1
            if shown is not None:
                # rich prefers COLUMNS and LINES, which are old if a shell has exported them
                if all(size := os.get_terminal_size(sys.stdout.fileno())):
                    console.size = size
                live.update(view.draw(shown, sampler.calls_of, *console.size), refresh=True)
    return False
