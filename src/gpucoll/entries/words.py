"""The tables that compiled entries read: Python's objects by identity, and the calls for them."""

from __future__ import annotations

from gpucoll.arrays.tensor_table import TensorTable, TensorView
from gpucoll.blocks import Block, Field, Words, words
from gpucoll.transport.shared.words import Call, Context, Pending, Segment

MAX_ENTRIES = 16


class Entry(Block):
    """The call for one dtype, op and root, each an address of a Python object."""

    dtype: int  # for tensors: the dtype's key
    operation: int
    root: int
    call: Field[Call]


class EntryTable(Block):
    """What the built-ins of one collective, or of messages, have in their capsule."""

    context: Field[Context]
    array_type: int
    count: int  # of entries
    none: int
    int_type: int
    sends: int  # whether its messages are sent
    list_type: int
    segments: Field[Segment]  # the first of a list's arrays
    seen: Field[Words]  # hash table of addresses
    float_type: int
    tensors: Field[TensorTable]  # with it tensors are read; 0 before the first tensor
    tensor_view: Field[TensorView] = words(TensorView.n_words)  # of the tensor that is being read
    queue: Field[Pending]
    tuple_type: int
    blocks: int  # address of the tables that `block_arguments` fills
    waits: Field[Call]  # waits for one message
    entries: Field[Entry] = words(MAX_ENTRIES * Entry.n_words)
