"""Asks the other hosts of a job how their ranks stand, through the leader of this host's."""

from __future__ import annotations

import os
import select
import socket
import time

from gpucoll.group.world import observers
from gpucoll.observe.json_report import Report, ReportError, from_json
from gpucoll.observe.segments import Observed
from gpucoll.rendezvous import frames

__all__ = ["ask"]

_MOST_BYTES = 8 * observers.MOST_TEXT_BYTES  # JSON within JSON


def ask(part: Observed, limit_s: float | None = None) -> tuple[list[Report], dict[str, list[int]]]:
    """Return what other hosts report, and the ranks of each host that has not answered.

    Returns
    -------
    reports : list of Report
        Of the hosts that have answered within `limit_s`; default: while the leader waits for them.
    silent : dict
        By name, the ranks of the other hosts; empty if the leader of this host does not answer.
    """
    try:
        with _connected(part) as end:
            limit_s = observers.ANSWERING_S if limit_s is None else limit_s
            return _answers(frames.Connection(end, _MOST_BYTES, 0), limit_s)
    except (OSError, frames.BadMessageError):
        return [], {}


def _connected(part: Observed) -> socket.socket:
    """Return a connection to the leader; OSError: there is none of the ranks' user."""
    leader = part.pids[0]
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        end.connect(observers.observers_address(part.job.group, leader))
        if observers.user_of(end) != os.stat(f"/proc/{leader}").st_uid:
            raise ConnectionError("another user has taken the address")
    except BaseException:
        end.close()
        raise
    return end


def _answers(
    connection: frames.Connection, limit_s: float
) -> tuple[list[Report], dict[str, list[int]]]:
    reports, silent, stop = list[Report](), dict[str, list[int]](), time.monotonic() + limit_s
    names: list[str] = []
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    while (left_s := stop - time.monotonic()) > 0 and (silent or not names):
        poll.poll(1000 * left_s)
        try:
            while (received := connection.receive()) is not None:
                facts = received[0]
                if "hosts" in facts:
                    names = [str(host["name"]) for host in facts["hosts"]]
                    ranks = [[int(rank) for rank in host["ranks"]] for host in facts["hosts"]]
                    silent = dict(zip(names, ranks, strict=True))
                    silent.pop(names[int(facts["here"])])
                elif found := from_json(str(facts["text"])):
                    reports += found
                    silent.pop(names[int(facts["host"])], None)
        except (OSError, frames.BadMessageError):  # the leader has ended, or gives up
            break
        except ReportError:  # that host could not look: it counts as silent
            continue
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            break
    return reports, silent
