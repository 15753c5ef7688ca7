"""Names that other libraries use: an AttributeError that says what to write here."""

from __future__ import annotations

import copy
import inspect
import pickle
import pydoc
import re
import subprocess
import sys

import pytest

import gpucoll
from gpucoll.api.coming_from import rows
from gpucoll.api.communicator import Communicator
from gpucoll.api.names_elsewhere import MEMBERS, NAMES, missing_from_communicator
from gpucoll.errors import ArgumentTypeError

ON_A_COMMUNICATOR = {
    "size": "'Communicator' object has no attribute 'size': mpi4py's size is comm.world_size here",
    "Get_rank": "'Communicator' object has no attribute 'Get_rank': mpi4py's Get_rank is comm.rank "
    "here; an attribute, not a call",
    "Allreduce": "'Communicator' object has no attribute 'Allreduce': mpi4py's Allreduce is "
    "comm.all_reduce(x, op, out=out) here",
    "isend": "'Communicator' object has no attribute 'isend': mpi4py's isend is "
    "comm.send_object(value, dest, tag, async_op=True) here; the Work that it returns has wait() "
    "and done(). torch.distributed's is comm.send(x, dest, tag, async_op=True) here; "
    "the Work that it returns has wait() and done()",
    "bcast": "'Communicator' object has no attribute 'bcast': mpi4py's bcast is "
    "comm.broadcast_object(value, root) here; for arrays and numbers comm.broadcast(x, root) is "
    "faster. cupy.cuda.nccl's is comm.broadcast(x, root, out=x) here",
    "Spawn": "'Communicator' object has no attribute 'Spawn': mpi4py's Spawn does not exist here; "
    "start all processes together; later ones call gpucoll.join(), and comm.grow() lets them in",
    "all_gather_into_tensor": "'Communicator' object has no attribute 'all_gather_into_tensor': "
    "torch.distributed's all_gather_into_tensor is comm.all_gather(x, out=out) here",
    "brodcast": "'Communicator' object has no attribute 'brodcast'",  # Python suggests the rest
    "temperature": "'Communicator' object has no attribute 'temperature'",
    "_grouping": "'Communicator' object has no attribute '_grouping'",
    "__array_interface__": "'Communicator' object has no attribute '__array_interface__'",
}

ON_THE_PACKAGE = {
    "all_reduce": "module 'gpucoll' has no attribute 'all_reduce': a communicator has it: comm = "
    "gpucoll.init(), then comm.all_reduce",
    "get_rank": "module 'gpucoll' has no attribute 'get_rank': torch.distributed's get_rank is "
    "comm.rank here, with comm = gpucoll.init()",
    "size": "module 'gpucoll' has no attribute 'size': mpi4py's size is comm.world_size here, with "
    "comm = gpucoll.init()",
    "COMM_WORLD": "module 'gpucoll' has no attribute 'COMM_WORLD': mpi4py's COMM_WORLD is "
    "gpucoll.init() here; a call that makes a communicator, not a constant; "
    "gpucoll.Communicator.from_mpi(MPI.COMM_WORLD) makes one beside MPI",
    "PRODUCT": "module 'gpucoll' has no attribute 'PRODUCT': torch.distributed's PRODUCT is "
    'op="prod" here',
    "pmin": "module 'gpucoll' has no attribute 'pmin': JAX's pmin is gcj.all_reduce(x, \"min\") "
    "here",
    "lanch": "module 'gpucoll' has no attribute 'lanch'; did you mean launch?",
    "al_reduce": "module 'gpucoll' has no attribute 'al_reduce'; did you mean comm.all_reduce?",
    "temperature": "module 'gpucoll' has no attribute 'temperature'",
    "__wrapped__": "module 'gpucoll' has no attribute '__wrapped__'",
}


@pytest.fixture(scope="module")
def alone():
    with gpucoll.init(rank=0, world_size=1, backend="cpu") as comm:
        yield comm


@pytest.mark.parametrize("name", ON_A_COMMUNICATOR)
def test_a_communicator_says_what_it_is_called_here(alone, name):
    with pytest.raises(AttributeError, match=f"^{re.escape(ON_A_COMMUNICATOR[name])}$"):
        getattr(alone, name)
    assert not hasattr(alone, name)


@pytest.mark.parametrize("name", ON_THE_PACKAGE)
def test_the_package_says_who_has_it(name):
    with pytest.raises(AttributeError, match=f"^{re.escape(ON_THE_PACKAGE[name])}$"):
        getattr(gpucoll, name)


def test_the_table_says_what_is_there(alone):
    public = {name for name in dir(alone) if not name.startswith("_")}

    assert set(MEMBERS) == public
    assert not public & {*NAMES}
    for row in rows():
        assert row.here or row.differs
        assert {*re.findall(r"\bcomm\.(\w+)", f"{row.here} {row.differs}")} <= public, row


def test_every_keyword_of_the_table_is_one():
    for row in rows():
        for called, given in re.findall(r"\bcomm\.(\w+)\(([^()]*)\)", f"{row.here} {row.differs}"):
            parameters = inspect.signature(getattr(Communicator, called)).parameters
            for keyword in re.findall(r"(\w+)=", given):
                assert keyword in parameters, row


def test_tools_see_an_ordinary_object(alone):
    with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
        pickle.dumps(alone)
    with pytest.raises(ArgumentTypeError, match="cannot be pickled"):
        copy.copy(alone)
    assert not hasattr(alone, "_repr_html_")
    assert not hasattr(alone, "__len__")
    assert not callable(alone)
    assert dict(inspect.getmembers(alone))["rank"] == 0
    assert "bcast" not in {*dir(alone), *dir(Communicator)}
    assert "bcast" not in pydoc.render_doc(Communicator)
    assert "__getattr__" not in dir(Communicator)  # it would cost every small call
    bare = Communicator.__new__(Communicator)  # what a failed __init__ leaves
    with pytest.raises(AttributeError, match="'_group'"):
        bare._group  # noqa: B018


def test_asking_the_package_loads_nothing():
    program = (
        "import sys, gpucoll\n"
        "assert not hasattr(gpucoll, 'all_reduce') and not hasattr(gpucoll, 'nonsense')\n"
        "print('numba' in sys.modules, 'numpy' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert found.stdout.split() == ["False", "False"], found


def test_a_text_for_every_name():
    for name in NAMES:
        assert re.search(r"'s \w+ (is .+|does not exist) here", missing_from_communicator(name))


def test_an_import_reads_no_table():
    program = (
        "import sys, gpucoll.api.communicator; print('gpucoll.api.coming_from' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert found.stdout == "False\n", found
