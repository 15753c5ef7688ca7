"""The patterns: what can be measured in addition to plain collectives, one row each.

A pattern has the arrays and results of a collective (given by `rank.inputs.plain`), or it has no
arrays and counts wrong results itself. How each library implements a pattern is in its
``..._patterns.py`` under `rank`; patterns with a program of their own are in `programs`.
"""

from __future__ import annotations

from dataclasses import replace

from gpucoll.bench.collectives import COLLECTIVES, Collective, whole
from gpucoll.bench.rank.inputs import ASYNC

__all__ = ["MEASURED", "NAME_GROUPS", "PATTERNS"]

MESSAGES = ("send_recv", "ping_pong", "stream", "barrier")

ASYNCHRONOUS = {
    ASYNC + name: replace(row, planned=False, listed=False, limited=False)
    for name, row in COLLECTIVES.items()
    if name not in MESSAGES
}

MESSAGE = Collective(whole, planned=False, tensors=False, least_ranks=2)
OVERLAP = Collective(None, reduces=True, planned=False, tensors=False, parts=("blocking", "work"))
OBJECTS = Collective(None, planned=False, tensors=False)
ROOTED_OBJECTS = replace(OBJECTS, has_root=True)
PROGRAM = Collective(None, has_data=False, planned=False, tensors=False, own_program=True)

PATTERNS = {
    **ASYNCHRONOUS,
    "overlap": OVERLAP,
    "overlap_sleep": OVERLAP,
    "isend_irecv": replace(MESSAGE, tensors=True),
    "probe_recv": MESSAGE,
    "recv_unknown": MESSAGE,
    "broadcast_object": ROOTED_OBJECTS,
    "gather_object": replace(ROOTED_OBJECTS, in_blocks=True),
    "scatter_object": replace(ROOTED_OBJECTS, in_blocks=True),
    "all_gather_object": replace(OBJECTS, in_blocks=True),
    "producer_consumer": replace(MESSAGE, bus_factor=None, has_data=False, checks_itself=True),
    "startup": PROGRAM,
    "memory": PROGRAM,
}

MEASURED = {**COLLECTIVES, **PATTERNS}
"""Every name that the command line accepts."""

NAME_GROUPS = {"all": list(COLLECTIVES), "async": list(ASYNCHRONOUS), "patterns": list(PATTERNS)}
"""Names that stand for several."""
