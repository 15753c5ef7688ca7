"""``gpucoll-doctor``: report what works on this machine, what is used and why, and what is missing.

Every probe runs in its own process under a deadline (`isolation`), so that a driver that hangs or
crashes becomes a line of the report. The probes return plain data (`facts`). Pure functions draw
conclusions from it: `choice` determines the backend for each kind of arrays, `advice` what to
install, `text` formats the report.
"""

from __future__ import annotations
