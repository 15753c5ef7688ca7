"""``gpucoll-doctor``: what was found on this machine, what is used and why, and what is missing.

Every probe runs in a process of its own under a deadline (`isolation`), so that a driver that hangs
or crashes becomes a line. What the probes find is plain data (`facts`); from it pure functions
conclude: `choice` which backend takes which arrays, `advice` what to install, `text` how it reads.
"""

from __future__ import annotations
