"""Elastic training: what programs import as ``horovod.common.elastic``."""

from __future__ import annotations

from gpucoll.integrations.horovod.elastic.membership import reset
from gpucoll.integrations.horovod.elastic.news import HostUpdateResult
from gpucoll.integrations.horovod.elastic.notification import notification_manager
from gpucoll.integrations.horovod.elastic.run import run, run_fn
from gpucoll.integrations.horovod.elastic.state import ObjectState, State

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "notification_manager",
    "reset",
    "run",
    "run_fn",
]
