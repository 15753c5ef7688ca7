"""The words between Python and the compiled MPI loop: one array per communicator."""

from __future__ import annotations

from gpucoll.blocks import Block, Field, Words, words


class Move(Block):
    """What an exchange moves between this rank and another."""

    send_from: int
    send_bytes: int
    receive_at: int
    receive_bytes: int


class MpiWords(Block):
    """What Python and the MPI loop share: `Call.mpi`."""

    # The rank.
    communicator: int  # handles are int or pointers, by implementation: a word holds either
    rank: int
    world_size: int
    # The implementation.
    has_large_counts: int  # whether the functions below are those of MPI-4 with MPI_Count
    most_bytes: int  # limit of one message, and of a whole call without large counts
    request_bytes: int
    in_place: int
    byte: int
    # Requests that a call waits for.
    requests: int  # address; up to two for each rank
    statuses: int
    n_requests: int
    flag: int
    error: int  # MPI's return value
    is_given_up: int  # whether requests were left to MPI, with the memory that they use
    # Memory.
    scratch: int
    scratch_bytes: int
    vectors: int  # address of counts and displacements: four for each rank
    moves: Field[Move]  # an exchange: one for each rank
    inputs: Field[Words]  # address of addresses, for each rank and one more
    # Functions, by address.
    test: int
    test_all: int
    send: int
    receive: int
    all_reduce: int
    reduce: int
    scan: int
    exclusive_scan: int
    broadcast: int
    all_gather: int
    all_gather_counts: int
    gather: int
    gather_counts: int
    scatter: int
    scatter_counts: int
    all_to_all: int
    all_to_all_counts: int
    get_count: int
    # The arrays' memory.
    is_on_gpu: int  # whether arrays lie where MPI, but no instruction of the host, can access them


FUNCTIONS = {
    MpiWords.test: "MPI_Test",
    MpiWords.test_all: "MPI_Testall",
    MpiWords.send: "MPI_Isend",
    MpiWords.receive: "MPI_Irecv",
    MpiWords.all_reduce: "MPI_Iallreduce",
    MpiWords.reduce: "MPI_Ireduce",
    MpiWords.scan: "MPI_Iscan",
    MpiWords.exclusive_scan: "MPI_Iexscan",
    MpiWords.broadcast: "MPI_Ibcast",
    MpiWords.all_gather: "MPI_Iallgather",
    MpiWords.all_gather_counts: "MPI_Iallgatherv",
    MpiWords.gather: "MPI_Igather",
    MpiWords.gather_counts: "MPI_Igatherv",
    MpiWords.scatter: "MPI_Iscatter",
    MpiWords.scatter_counts: "MPI_Iscatterv",
    MpiWords.all_to_all: "MPI_Ialltoall",
    MpiWords.all_to_all_counts: "MPI_Ialltoallv",
    MpiWords.get_count: "MPI_Get_count",
}
"""The MPI function at each address; with large counts the one whose name ends in ``_c``."""
ALIKE = (MpiWords.test, MpiWords.test_all)
"""Functions without such a form."""
PIECE_BYTES = 4 << 20
"""Size of the pieces of reductions that MPI does not do, which limits the scratch memory."""
GATHERED_BYTES = 16 << 10
"""Up to this size of all ranks' inputs together, each rank gets all of them in one step."""


# --- messages between hosts -----------------------------------------------------------------------

N_SLOTS = 8
"""Number of pieces that a carrier has under way, in each direction."""
SLOT_BYTES = 128 << 10
CALL_TAG, MESSAGE_TAG, EXCHANGE_TAG = range(3)
"""Tags on one communicator: exchanges of collectives, carriers' data, comparisons of leaders."""


class Carrier(Block):
    """A carrier: it carries the bytes of messages to and from a rank elsewhere."""

    mpi: Field[MpiWords]  # address of the communicator's words
    peer: int  # its rank
    flag: int
    count: int
    error: int  # MPI's return value
    status: int  # address
    is_listening: int  # whether the receives below were posted
    # Incoming: slots in turn, and how much of the first one was taken.
    in_slot: int
    in_start: int
    in_stop: int
    in_memory: int  # address of the slots
    out_slot: int
    out_memory: int
    in_requests: Field[Words] = words(N_SLOTS)
    out_requests: Field[Words] = words(N_SLOTS)
