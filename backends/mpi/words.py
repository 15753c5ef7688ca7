"""The words between Python and the compiled MPI loop: one array per communicator."""

from __future__ import annotations

from enum import IntEnum


class Word(IntEnum):
    """Fields of the array whose address is in a call block's `Call.MPI`."""

    # The rank.
    COMMUNICATOR = 0  # handles are int or pointers, by implementation: a word holds either
    RANK = 1
    WORLD_SIZE = 2
    # The implementation.
    HAS_LARGE_COUNTS = 3  # whether the functions below are those of MPI-4 with MPI_Count
    MOST_BYTES = 4  # limit of one message, and of a whole call without large counts
    REQUEST_BYTES = 5
    IN_PLACE = 6
    BYTE = 7
    # Requests that a call waits for.
    REQUESTS = 8  # address; up to two for each rank
    STATUSES = 9
    N_REQUESTS = 10
    FLAG = 11
    ERROR = 12  # MPI's return value
    IS_GIVEN_UP = 13  # whether requests were left to MPI, with the memory that they use
    # Memory.
    SCRATCH = 14
    SCRATCH_BYTES = 15
    VECTORS = 16  # address of counts and displacements: four for each rank
    MOVES = 17  # address of an exchange: `MOVE_WORDS` for each rank
    INPUTS = 18  # address of addresses, for each rank and one more
    # Functions, by address.
    TEST = 19
    TEST_ALL = 20
    SEND = 21
    RECEIVE = 22
    ALL_REDUCE = 23
    REDUCE = 24
    SCAN = 25
    EXCLUSIVE_SCAN = 26
    BROADCAST = 27
    ALL_GATHER = 28
    ALL_GATHER_COUNTS = 29
    GATHER = 30
    GATHER_COUNTS = 31
    SCATTER = 32
    SCATTER_COUNTS = 33
    ALL_TO_ALL = 34
    ALL_TO_ALL_COUNTS = 35
    GET_COUNT = 36
    # The arrays' memory.
    IS_ON_GPU = 37  # whether arrays lie where MPI, but no instruction of the host, can access them


WORDS = 38
FUNCTIONS = {
    Word.TEST: "MPI_Test",
    Word.TEST_ALL: "MPI_Testall",
    Word.SEND: "MPI_Isend",
    Word.RECEIVE: "MPI_Irecv",
    Word.ALL_REDUCE: "MPI_Iallreduce",
    Word.REDUCE: "MPI_Ireduce",
    Word.SCAN: "MPI_Iscan",
    Word.EXCLUSIVE_SCAN: "MPI_Iexscan",
    Word.BROADCAST: "MPI_Ibcast",
    Word.ALL_GATHER: "MPI_Iallgather",
    Word.ALL_GATHER_COUNTS: "MPI_Iallgatherv",
    Word.GATHER: "MPI_Igather",
    Word.GATHER_COUNTS: "MPI_Igatherv",
    Word.SCATTER: "MPI_Iscatter",
    Word.SCATTER_COUNTS: "MPI_Iscatterv",
    Word.ALL_TO_ALL: "MPI_Ialltoall",
    Word.ALL_TO_ALL_COUNTS: "MPI_Ialltoallv",
    Word.GET_COUNT: "MPI_Get_count",
}
"""The MPI function at each address; with large counts the one whose name ends in ``_c``."""
ALIKE = (Word.TEST, Word.TEST_ALL)
"""Functions without such a form."""
MOVE_WORDS = 4
SEND_FROM, SEND_BYTES, RECEIVE_AT, RECEIVE_BYTES = range(MOVE_WORDS)
"""Fields of what an exchange moves between this rank and another."""
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


class Carrier(IntEnum):
    """Fields of a carrier, which carries the bytes of messages to and from a rank elsewhere."""

    WORDS = 0  # address of the communicator's words
    PEER = 1  # its rank
    FLAG = 2
    COUNT = 3
    ERROR = 4  # MPI's return value
    STATUS = 5  # address
    IS_LISTENING = 6  # whether the receives below were posted
    # Incoming: slots in turn, and how much of the first one was taken.
    IN_SLOT = 7
    IN_START = 8
    IN_STOP = 9
    IN_MEMORY = 10  # address of the slots
    OUT_SLOT = 11
    OUT_MEMORY = 12
    IN_REQUESTS = 13
    OUT_REQUESTS = IN_REQUESTS + N_SLOTS


CARRIER_WORDS = Carrier.OUT_REQUESTS + N_SLOTS
