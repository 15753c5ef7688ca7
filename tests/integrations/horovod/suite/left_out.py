"""What of Horovod's own tests does not pass on the front, each with its reason.

A dictionary for each file; a test is named ``Class::test``. It must fail or be skipped: one that
passes is taken off the list. What Horovod's tests skip themselves need not be listed.
"""

from __future__ import annotations

TORCH: dict[str, str] = {}

MXNET: dict[str, str] = {}
"""Five tests skip themselves without a GPU."""
