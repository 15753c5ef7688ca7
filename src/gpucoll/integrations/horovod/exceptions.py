"""The exceptions that programs of Horovod catch."""

from __future__ import annotations

__all__ = ["HorovodInternalError", "HorovodVersionMismatchError", "HostsUpdatedInterrupt"]


class HorovodInternalError(RuntimeError):
    """A collective failed: a rank was lost, or the ranks asked for different things.

    The error of gpucoll that names the rank is its cause. Elastic training goes back to the last
    commit.
    """


class HostsUpdatedInterrupt(RuntimeError):
    """Ranks have come, or are to leave; elastic training begins again with what it has.

    Parameters
    ----------
    skip_sync : bool
        Whether the ranks that stay need not exchange their state.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Never raised here: nothing is compiled against a framework. Programs catch it."""

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is not {installed_version}")
        self.name, self.version, self.installed_version = name, version, installed_version
