"""Results other than the time of a call: their names, units and format."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIGURES", "Figure"]

MIB = 2.0**20


@dataclass(frozen=True)
class Figure:
    """A figure. The JSON has it in seconds, bytes or a count.

    Attributes
    ----------
    title : str
        Its name, with the unit for people.
    unit : float
        This unit, as a multiple of the JSON's.
    """

    title: str
    unit: float = 1.0
    digits: int = 2

    def text(self, value: float) -> str:
        """Format a value in this unit."""
        return f"{value / self.unit:.{self.digits}f}"


def of_step(step: str) -> dict[str, Figure]:
    """Return the figures of one step."""
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
