"""`DiLoCo`: ranks train for many steps on their own, and then make one step together."""

from __future__ import annotations

import copy
import operator
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import gpucoll
from gpucoll import ArgumentError, ArgumentTypeError, Communicator, Compression, StateError
from gpucoll.api.agreement import agree, check_communicator
from gpucoll.training.exchange import Exchange, Transfer
from gpucoll.training.outer import Outer, OuterFunction, State, check_number
from gpucoll.training.parameters import AnyArray, Parameters, Vector, fragments_of

_LOSSES = (gpucoll.PeerLostError, gpucoll.DeadlineError, gpucoll.AbortedError)


@dataclass
class Pending:
    """An outer step that is not complete, or that the ranks that are left may have to repeat."""

    given: Vector
    """What this rank gives: its pseudo-gradient, or its parameters if these are averaged."""
    transfer: Transfer | None = None
    """None if it is yet to be started on the present communicator."""
    undone: Undone | None = None
    """If this rank has completed the step before, and others have not."""


@dataclass(frozen=True)
class Undone:
    """What a rank has of an outer step that is to be repeated, and from which it has gone on."""

    values: Vector
    local_steps: int
    next: Pending | None


class DiLoCo:
    """Training in which the ranks communicate once in many steps: DiLoCo and its kin.

    Each rank trains with an optimizer of its own (the inner one) and calls `step` after each of its
    steps. Every `every` steps the ranks average their pseudo-gradients, that is, how far each has
    come from the parameters that all had in common, and make one outer step from there. The outer
    state has the same bits on every rank. Collective: rank 0's parameters are written to those of
    all other ranks.

    Parameters
    ----------
    comm : Communicator
        Of the ranks that train together. A program that makes calls of its own between the steps
        passes ``comm.duplicate()``.
    parameters : iterable of arrays
        The model's parameters, such as ``model.parameters()``: arrays of NumPy, CuPy, PyTorch or
        JAX, of float16, bfloat16, float32 or float64; the same shapes and dtypes on all ranks.
    every : int
        Inner steps from one outer step of a fragment to its next: a multiple of `fragments`.
    outer : str or function
        "nesterov", "sgd" (which has no momentum), or ``function(values, gradient, memory)``. The
        function gets a fragment's common parameters and mean pseudo-gradient as flat NumPy arrays,
        and a dict that it may keep arrays in. It returns the new values; given the same it must
        return the same bits on all ranks.
    lr, momentum : float
        Of the outer optimizer.
    compression : str or Compression, optional
        What travels: "int8_block" or "int8", "float8_block" or "float8", "float16", "bfloat16",
        with error feedback; or ``Compression("topk")``, which is SparseLoCo. Its error feedback
        takes the place of momentum: pass ``outer="sgd"``.
    fragments : int
        Number of parts of about equal size, made of whole arrays, that take turns (Streaming
        DiLoCo).
    delay : int
        Inner steps that the ranks make while a fragment travels: less than ``every / fragments``.
    mix : float
        How much of this rank's own parameters stays after an outer step, from 0 to 1.

    Raises
    ------
    ArgumentError, ArgumentTypeError, MismatchError
        On every rank, before anything moves: an argument is wrong on one rank, or ranks have
        different ones. The communicator stays usable.

    Notes
    -----
    The outer state is in host memory: the common parameters, the momentum if there is one and the
    residual of a compression, each as large as all parameters in float32 (float64 if one is). Of
    the largest fragment there is as much again, and in an outer step three vectors more.

    With ``lr=1`` and no momentum an outer step leads to the mean of the ranks' parameters. Without
    compression these are averaged themselves, so that one rank keeps its own bits.

    If a rank is lost, `step` shrinks the communicator and goes on from the last outer state that
    all ranks have that are left. They repeat an interrupted outer step with their pseudo-gradients,
    so that none of their work is lost. All count the same steps as before.

    Examples
    --------
    >>> diloco = DiLoCo(comm, model.parameters(), every=500)
    >>> for batch in batches:
    ...     optimizer.zero_grad()
    ...     loss(model, batch).backward()
    ...     optimizer.step()
    ...     diloco.step()
    """

    def __init__(
        self,
        comm: Communicator,
        parameters: Iterable[AnyArray],
        *,
        every: int,
        outer: str | OuterFunction = "nesterov",
        lr: float = 0.7,
        momentum: float = 0.9,
        compression: str | Compression | None = None,
        fragments: int = 1,
        delay: int = 0,
        mix: float = 0.0,
    ) -> None:
        check_communicator(comm)
        self._comm = comm
        self._owned: Communicator | None = None
        self._is_closed = False
        self._outer_steps = self._local_steps = 0
        self._bytes_sent = 0.0
        self._states: list[State] = []
        self._pending: Pending | None = None
        self._before: tuple[State, Pending] | None = None
        self._settings: dict[str, str] = {}
        self._initial: list[Vector] = []
        self._is_apart = True
        problem = None
        try:
            self._outer = Outer(outer, lr, momentum)
            self._parameters = given = Parameters(parameters)
            self._exchange = Exchange.parse(compression, given.dtype)
            self._averages = compression is None and self._outer.averages
            self._divide(every, fragments, delay, mix)
            if self._exchange.is_sparse and self._outer.has_momentum:
                raise ArgumentError(
                    "compression topk takes the place of the outer momentum: pass outer='sgd', or "
                    "momentum=0"
                )
            if isinstance(compression, Compression):
                compression = replace(compression, seed=None)  # ranks may have different ones
            self._settings |= {"outer": str(self._outer), "compression": str(compression)}
            self._settings |= given.settings()
            self._initial = [given.read(*part) for part in self._fragments]
        except Exception as error:
            problem = error  # first every rank is told
        self._advance(problem=problem)

    def _divide(self, every: int, fragments: int, delay: int, mix: float) -> None:
        """Set which arrays make an outer step when."""
        every, fragments = _integer("every", every, 1), _integer("fragments", fragments, 1)
        delay = _integer("delay", delay, 0)
        sizes = self._parameters.sizes
        check_number("mix", mix, 0, 1)
        if fragments > len(sizes):
            raise ArgumentError(
                f"fragments are made of whole arrays: {fragments} is more than the {len(sizes)} "
                "parameters"
            )
        if every % fragments:
            raise ArgumentError(f"every must be a multiple of fragments; got {every}, {fragments}")
        self._period = every // fragments
        if delay >= self._period:
            raise ArgumentError(
                f"delay must be less than every / fragments, which is {self._period}; got {delay}"
            )
        self._delay, self._mix = delay, float(mix)
        self._fragments = fragments_of(sizes, fragments)
        self._settings = {"every": str(every), "fragments": str(fragments)}
        self._settings |= {"delay": str(delay), "mix": str(self._mix)}

    # --- steps ------------------------------------------------------------------------------------

    @property
    def comm(self) -> Communicator:
        """The communicator of the ranks that train together now."""
        return self._comm

    @property
    def parameters(self) -> list[AnyArray]:
        """The parameters: the arrays given, or those that have taken the place of JAX's."""
        return list(self._parameters.arrays)

    @property
    def outer_steps(self) -> int:
        """The number of outer steps made; each is that of one fragment."""
        return self._outer_steps

    @property
    def steps_to_sync(self) -> int:
        """The number of calls of `step` up to the one that makes the next outer step."""
        return self._period - self._local_steps

    @property
    def bytes_per_outer_step(self) -> float:
        """The bytes that a rank sends for the next outer step, on average over the ranks."""
        return self._exchange.sent_bytes(
            len(self._states[self._fragment].values),
            self._parameters.dtype.itemsize,
            self._comm.world_size,
        )

    @property
    def bytes_sent(self) -> float:
        """The bytes of all outer steps that this rank has started: the sum of the formula."""
        return self._bytes_sent

    def step(self, parameters: Iterable[AnyArray] | None = None) -> list[AnyArray]:
        """Count an inner step of this rank, and make what part of an outer step is due.

        Call it on every rank once after each step of the inner optimizer. It returns at once except
        at outer steps, for which the ranks wait for each other.

        Parameters
        ----------
        parameters : iterable of arrays, optional
            The parameters after the inner step, if they are other arrays than before. JAX's always
            are.

        Returns
        -------
        list of arrays
            The parameters: the same arrays, which have been written, or for JAX new ones.

        Raises
        ------
        ShrinkError
            Ranks were lost, and this one may not go on without them.
        """
        self._check_open()
        if parameters is not None:
            self._parameters.replace(parameters)
        elif self._parameters.immutable:
            raise ArgumentError(
                "JAX's arrays cannot be written: call parameters = diloco.step(parameters)"
            )
        self._local_steps += 1
        self._advance()
        return self.parameters

    def recover(self, comm: Communicator | None = None) -> None:
        """Go on after a loss that the program noticed in a call of its own. Collective.

        Parameters
        ----------
        comm : Communicator, optional
            What the program got from ``shrink()``. Default: shrink the present one.

        Notes
        -----
        Parameters may be written: for JAX the new arrays are in `parameters`.
        """
        self._check_open()
        if comm is not None:
            check_communicator(comm)
            self._comm, self._owned = comm, None  # shrink has closed the one before
        self._lose_transfer()
        self._advance(shrinks=comm is None)

    def confirm(self) -> None:
        """Wait until all ranks have completed the outer steps made so far. Collective.

        Call it on all ranks after the same number of steps: at the end of the training, and before
        a checkpoint. If a rank is lost here, the others go on as in `step`. Without it a rank may
        end the training while another one has to repeat the last outer step.
        """
        self._check_open()
        self._advance(confirms=True)

    def _advance(
        self, *, shrinks: bool = False, confirms: bool = False, problem: Exception | None = None
    ) -> None:
        """Make what is due, with the ranks that are left."""
        while True:
            if shrinks:
                self._comm = self._owned = self._comm.shrink()  # which closes the one before
            try:
                if self._is_apart:
                    self._meet(problem)
                    self._is_apart = False
                self._comm.check()  # a rank hears of losses in the next step, not only at a sync
                self._make_due()
                if confirms:
                    self._comm.barrier()
                return
            except _LOSSES:
                shrinks = True
                self._lose_transfer()

    def _lose_transfer(self) -> None:
        """Make sure that the ranks meet again, and then start a transfer that a loss has ended."""
        self._is_apart = True
        if self._pending is not None:
            self._pending.transfer = None

    def _meet(self, problem: Exception | None) -> None:
        """Come to the same outer state on all ranks, of which some may be new.

        Those that are not new go back to the last outer step that all of them have completed. They
        are at most one apart: no rank completes a step before all have completed the last one.
        """
        comm, own = self._comm, None
        if self._states:
            own = self._outer_steps, self._pending is not None and bool(self._pending.transfer)
        positions = agree(comm, type(self).__name__, problem, self._settings, own)
        there = {rank: item for rank, item in enumerate(positions) if item is not None}
        for rank, (_, in_flight) in there.items():
            if in_flight:
                raise StateError(
                    f"on rank {rank} of {comm.world_size} a fragment is in flight: call adopt "
                    "right after an outer step"
                )
        steps = [outer_steps for outer_steps, _ in there.values()]
        if steps and max(steps) - min(steps) > 1:
            raise StateError(f"the ranks are of different trainings: of {steps} outer steps")
        if steps:
            self._go_back(min(steps))
        if len(there) < comm.world_size:
            self._hand_over(comm, min(there, default=0))
        self._initial = []

    def _go_back(self, outer_steps: int) -> None:
        if outer_steps < self._outer_steps and self._before is not None:
            self._outer_steps = outer_steps
            number, (state, pending) = self._fragment, self._before
            pending.undone = Undone(self._states[number].values, self._local_steps, self._pending)
            self._states[number], self._pending, self._before = state, pending, None
            self._local_steps = self._period

    def _hand_over(self, comm: Communicator, root: int) -> None:
        """Give the outer state of `root` to those that have none."""
        is_new, handed, initial = not self._states, None, self._initial
        if comm.rank == root:
            if is_new:
                self._states = [State(item, {}, self._residual(item)) for item in initial]
            common = [(state.values, state.memory) for state in self._states]
            handed = common, self._outer_steps, self._local_steps
        common, outer_steps, local_steps = comm.broadcast_object(handed, root)
        if is_new and comm.rank != root:
            self._states = [State(*item, self._residual(item[0])) for item in common]
            self._outer_steps, self._local_steps = outer_steps, local_steps
            for state, part in zip(self._states, self._fragments, strict=True):
                self._parameters.write(state.values, *part)

    @property
    def _fragment(self) -> int:
        """The number of the fragment whose outer step is next."""
        return self._outer_steps % len(self._fragments)

    def _make_due(self) -> None:
        number = self._fragment
        state = self._states[number]
        if self._pending is None and self._local_steps >= self._period - self._delay:
            own = self._parameters.read(*self._fragments[number])
            if not self._averages:
                np.subtract(state.values, own, out=own)
            self._pending = Pending(own)
        pending = self._pending
        if pending is None:
            return
        if pending.transfer is None:
            sent = self.bytes_per_outer_step
            pending.transfer = self._exchange.start(
                self._comm, pending.given, state.residual, self._outer_steps
            )
            self._bytes_sent += sent
        if self._local_steps >= self._period:
            self._apply(number, state, pending, pending.transfer)
            if self._pending is not None or self._local_steps:
                self._make_due()  # a step was repeated; since then the next may have become due

    def _apply(self, number: int, state: State, pending: Pending, transfer: Transfer) -> None:
        """Wait for the mean and make the outer step of a fragment."""
        mean = transfer.mean()
        self._before = None  # every rank is in this step, so all have completed the one before
        values, memory = (mean, {}) if self._averages else self._outer.step(state, mean)
        self._write(number, values, pending.undone)
        self._local_steps, self._pending = 0, None
        if pending.undone is not None:
            self._local_steps, self._pending = pending.undone.local_steps, pending.undone.next
        pending.transfer = pending.undone = None
        self._before = state, pending  # until a rank may be sure that all have completed this one
        self._states[number] = State(values, memory, transfer.residual)
        self._outer_steps += 1

    def _write(self, number: int, values: Vector, undone: Undone | None) -> None:
        """Bring this rank's parameters of a fragment to new common values, up to `mix`."""
        part, mix = self._fragments[number], values.dtype.type(self._mix)
        if undone is not None:  # keep the inner steps that were made since
            further = values - undone.values
            if undone.next is not None and len(self._fragments) == 1:
                undone.next.given = undone.next.given + further * (
                    1 - mix if self._averages else mix
                )
            self._parameters.write(self._parameters.read(*part) + further * (1 - mix), *part)
        elif not mix:
            self._parameters.write(values, *part)
        elif mix != 1:
            written = self._parameters.read(*part) - values
            written *= mix
            written += values
            self._parameters.write(written, *part)

    # --- the state --------------------------------------------------------------------------------

    def grow(self, **given: Any) -> None:
        """Let processes in that wait in `gpucoll.join`. Collective.

        Newcomers make a `DiLoCo` with the same arguments over the communicator that they got. They
        get the outer state of the lowest rank that was there; a newcomer counts like a rank that
        made no step since then. Costs a small all_gather if nobody waits.

        Parameters
        ----------
        **given
            Arguments of `Communicator.grow`.

        Raises
        ------
        StateError
            A fragment is in flight: call this right after an outer step.
        """
        self._check_open()
        self._check_not_in_flight()
        try:
            grown = self._comm.grow(**given)
        except _LOSSES:
            self._lose_transfer()
            self._advance(shrinks=True)
            return
        if grown is not self._comm:  # which is closed
            self._comm = self._owned = grown
            self._is_apart = True
            self._advance()

    def adopt(self, comm: Communicator) -> None:
        """Go on with a communicator to which the program has added ranks. Collective.

        New ranks are as in `grow`. The communicator before stays the program's.

        Raises
        ------
        StateError
            On every rank: a fragment is in flight somewhere. Call this right after an outer step.
        """
        self._check_open()
        check_communicator(comm)
        if comm is self._comm:
            return
        before, owned = (self._comm, self._owned, self._is_apart), self._owned
        self._comm, self._owned, self._is_apart = comm, None, True
        try:
            self._advance()
        except (gpucoll.UsageError, gpucoll.MismatchError):
            self._comm, self._owned, self._is_apart = before
            raise
        if owned is not None and not owned.is_closed:
            owned.close()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank keeps, for a checkpoint: the outer state and its own residual.

        The parameters are the program's. The arrays are read-only and not copied. StateError while
        a fragment is in flight.
        """
        self._check_not_in_flight()
        return {
            "outer_steps": self._outer_steps,
            "local_steps": self._local_steps,
            "values": [_read_only(state.values) for state in self._states],
            "memory": [
                {name: _read_only(value) for name, value in state.memory.items()}
                for state in self._states
            ],
            "residuals": [_read_only(state.residual) for state in self._states],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what `state_dict` returned, of the same model and number of fragments. Collective.

        Parameters are not written. A residual that is missing is zero.

        Raises
        ------
        ArgumentError, MismatchError
            On every rank: a state does not fit, or ranks have different ones.
        """
        self._check_open()
        problem, states, settings = None, self._states, {}
        try:
            self._check_not_in_flight()
            states = self._states_of(state)
            steps = int(state["outer_steps"]), int(state["local_steps"])
            settings = {"outer_steps, local_steps": str(steps)}
            check = 0
            for item in states:
                for array in (item.values, *map(item.memory.get, sorted(item.memory))):
                    check = zlib.crc32(np.asarray(array).tobytes(), check)
            settings["the checksum of values"] = f"{check:#x}"
        except Exception as error:
            problem = error
        agree(self._comm, "load_state_dict", problem, settings, None)
        self._states, self._before = states, None
        self._outer_steps, self._local_steps = steps

    def _states_of(self, state: dict[str, Any]) -> list[State]:
        sizes = [len(item.values) for item in self._states]
        found = [np.array(values, self._parameters.dtype) for values in state["values"]]
        if [values.shape for values in found] != [(size,) for size in sizes]:
            given = [values.size for values in found]
            raise ArgumentError(f"the state has fragments of {given} values, not of {sizes}")
        memory, residuals = state["memory"], state["residuals"]
        return [
            State(values, copy.deepcopy(kept), self._residual(values, residual))
            for values, kept, residual in zip(found, memory, residuals, strict=True)
        ]

    def _residual(self, values: Vector, given: Vector | None = None) -> Vector | None:
        if self._exchange.how is None:
            return None
        if given is None:
            return np.zeros_like(values)
        if given.shape != values.shape:
            raise ArgumentError(f"a residual has {given.size} values, not {values.size}")
        return np.array(given, values.dtype)

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for a fragment in flight and drop it; close the communicator that a loss led to.

        The communicator that was given is the program's. Not collective.
        """
        if self._is_closed:
            return
        self._is_closed = True
        pending, self._pending, self._before = self._pending, None, None
        try:
            if pending is not None and pending.transfer is not None:
                pending.transfer.work.wait()
        finally:
            if self._owned is not None:
                self._owned.close()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self.close()
        elif not self._is_closed:
            self._is_closed = True
            if self._owned is not None:
                self._owned.__exit__(kind, *error)

    def _check_open(self) -> None:
        if self._is_closed:
            raise StateError(f"this {type(self).__name__} is closed")

    def _check_not_in_flight(self) -> None:
        if self._pending is not None:
            raise StateError(
                f"a fragment is in flight: its outer step is complete in {self.steps_to_sync} steps"
            )


def _integer(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ArgumentTypeError(f"{name} must be an int; got {value!r}")
    if value < least:
        raise ArgumentError(f"{name} must be at least {least}; got {value}")
    return operator.index(value)


def _read_only(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value
    view = value.view()
    view.flags.writeable = False
    return view
