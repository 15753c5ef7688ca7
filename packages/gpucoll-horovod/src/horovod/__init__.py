"""Horovod's API over gpucoll: this module puts gpucoll.integrations.horovod in its own place."""

import importlib
import sys

from gpucoll.integrations.horovod.alias import install

del sys.modules[__name__]
install()
importlib.import_module(__name__)
