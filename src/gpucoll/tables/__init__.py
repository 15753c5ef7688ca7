"""Tables and arrays that processes share without calling together: a parameter server's parts.

See `docs/tables.md`.
"""

from gpucoll.tables.published import Published

__all__ = ["Published"]
