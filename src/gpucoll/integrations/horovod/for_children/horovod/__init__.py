"""Horovod's API over gpucoll: this module puts gpucoll.integrations.horovod in its own place."""

from __future__ import annotations

import importlib
import sys

from gpucoll.integrations.horovod.alias import install

if __name__ == "horovod":
    del sys.modules[__name__]
    install()
    importlib.import_module(__name__)
