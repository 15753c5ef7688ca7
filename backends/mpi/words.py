"""What Python tells the compiled loop of MPI, word by word, one array per communicator."""

from __future__ import annotations

from enum import IntEnum


class Word(IntEnum):
    """Fields of the array whose address is in a call block's `Call.MPI`."""

    # Who.
    COMMUNICATOR = 0  # handles are int or pointers, by implementation: a word holds either
    RANK = 1
    WORLD_SIZE = 2
    # The implementation.
    HAS_LARGE_COUNTS = 3  # whether the functions below are those of MPI-4 with MPI_Count
    MOST_BYTES = 4  # of one message, and of all that a call without large counts may span
    REQUEST_BYTES = 5
    IN_PLACE = 6
    BYTE = 7
    # What a call is waiting for.
    REQUESTS = 8  # address; as many as two for each rank
    STATUSES = 9
    N_REQUESTS = 10
    FLAG = 11
    ERROR = 12  # what MPI has returned
    IS_GIVEN_UP = 13  # whether requests were left behind, with the memory that they are of
    # Memory.
    SCRATCH = 14
    SCRATCH_BYTES = 15
    VECTORS = 16  # address of counts and displacements: four of each rank
    MOVES = 17  # address of an exchange: `MOVE_WORDS` of each rank
    INPUTS = 18  # address of addresses, of each rank and one more
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
    # Whose memory.
    IS_ON_GPU = 37  # whether arrays lie where no instruction of the host reaches, but MPI does


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
"""Which function of MPI's lies where; with large counts the one whose name ends in ``_c``."""
ALIKE = (Word.TEST, Word.TEST_ALL)
"""Those that have no such form."""
MOVE_WORDS = 4
SEND_FROM, SEND_BYTES, RECEIVE_AT, RECEIVE_BYTES = range(MOVE_WORDS)
"""Fields of what an exchange moves between this rank and another."""
PIECE_BYTES = 4 << 20
"""Reductions that MPI does not do go in pieces of this size, so that scratch memory is bounded."""
GATHERED_BYTES = 16 << 10
"""Up to so many bytes of all ranks' inputs together, each rank gets all of them in one step."""


# --- messages between hosts -----------------------------------------------------------------------

N_SLOTS = 8
"""Of a carrier, each way: so many pieces are under way at once."""
SLOT_BYTES = 128 << 10
CALL_TAG, MESSAGE_TAG, EXCHANGE_TAG = range(3)
"""Over one communicator: what collectives exchange, carriers send, and leaders compare."""


class Carrier(IntEnum):
    """Fields of what carries the bytes of messages to and from one rank of another host."""

    WORDS = 0  # address of the communicator's
    PEER = 1  # its rank
    FLAG = 2
    COUNT = 3
    ERROR = 4  # what MPI has returned
    STATUS = 5  # address
    IS_LISTENING = 6  # whether the receives below were posted
    # What comes: slots in turn, and what of the first one's bytes was taken.
    IN_SLOT = 7
    IN_START = 8
    IN_STOP = 9
    IN_MEMORY = 10  # address of the slots
    OUT_SLOT = 11
    OUT_MEMORY = 12
    IN_REQUESTS = 13
    OUT_REQUESTS = IN_REQUESTS + N_SLOTS


CARRIER_WORDS = Carrier.OUT_REQUESTS + N_SLOTS
