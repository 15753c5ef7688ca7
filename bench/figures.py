"""What is measured beside the time of a call, or instead of it: names, units, how it is written."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIGURES"]

MIB = 2.0**20


@dataclass(frozen=True)
class Figure:
    """A figure; the JSON has it in seconds, bytes or pieces.

    Attributes
    ----------
    title : str
        What it is, with the unit in which people read it.
    unit : float
        That unit, in the JSON's.
    """

    title: str
    unit: float = 1.0
    digits: int = 2

    def text(self, value: float) -> str:
        """Return a value in the unit."""
        return f"{value / self.unit:.{self.digits}f}"


def of_step(step: str) -> dict[str, Figure]:
    """Return the figures of what one step takes."""
    return {
        f"{step}_shared_bytes": Figure(f"{step}: shared by all, MiB", MIB),
        f"{step}_private_bytes": Figure(f"{step}: private a rank, MiB", MIB),
        f"{step}_address_space_bytes": Figure(f"{step}: address space a rank, MiB", MIB, 1),
        f"{step}_descriptors": Figure(f"{step}: descriptors a rank", digits=1),
    }


FIGURES = {
    "joined_s": Figure("import to first result, s"),
    "cpu_s": Figure("CPU a rank, s"),
    "job_cpu_s": Figure("CPU of the whole job, s"),
    "peak_bytes": Figure("peak memory a rank, MiB", MIB, 1),
    **of_step("communicator"),
    **of_step("duplicate"),
}
