"""What of mpi4py's own tests is not run on the front, each with its reason.

Files that are not listed in `FILES` test what is not there at all: MPI-IO (test_io, test_file),
collectives of arrays and Split on intercommunicators (test_cco_buf_inter, test_cco_vec_inter,
test_comm_inter), dynamic processes (test_spawn, test_dynproc), sessions, C handles and ABI
(test_cffi, test_ctypes, test_mpiapi, test_mpiabi), generalised and partitioned requests
(test_grequest, test_p2p_buf_part), fault tolerance (test_ulfm), and mpi4py's package itself
(test_package, test_toplevel, test_doc, test_buffer: MPI.buffer is an array of uint8 here). Of its
modules of plain Python test_util_dtlib takes a minute, and test_util_sync needs windows that are
buffers, which classes can be from Python 3.12 on; both pass there.
"""

from __future__ import annotations

FILES = (
    *("test_cco_buf", "test_cco_vec", "test_cco_obj", "test_cco_nb_buf", "test_cco_nb_vec"),
    *("test_cco_pr_buf", "test_cco_pr_vec", "test_cco_ngh_buf", "test_cco_ngh_obj"),
    *("test_cco_pr_ngh_buf", "test_p2p_buf", "test_p2p_obj", "test_p2p_buf_matched"),
    *("test_p2p_obj_matched", "test_request", "test_status", "test_group", "test_comm"),
    *("test_comm_topo", "test_datatype", "test_op", "test_msgspec", "test_msgzero", "test_pack"),
    *("test_pickle", "test_attributes", "test_info", "test_errorcode", "test_errhandler"),
    *("test_exceptions", "test_environ", "test_subclass", "test_objmodel", "test_threads"),
    *("test_address", "test_mpimem", "test_win", "test_rma", "test_rma_nb", "test_handle"),
    *("test_cco_obj_inter", "test_util_pkl5", "test_util_pool"),
)

LEFT_OUT: dict[str, str] = {
    "CAIBuf": "host memory that says it lies on a GPU",
    "DLPackGPUBuf": "host memory that says it lies on a GPU",
    "Bottom": "BOTTOM is refused",
    "testMatchSize": "LOGICAL types are found by name alone",
    "testCodeCharStr": "PACKED has no code",
    "testByteOrder": "arrays of the other byte order are refused, whatever datatype is named",
    "TestErrorCode.testAddErrorClassCodeString": "classes that have codes are removed with them",
    "TestErrorCode.testException": "error codes are numbers of their own",
    "testAttrDeleteException": "Free raises what a deletion function raised",
    "TestObjModel.testReduce": "handles of subclasses are not kept apart by pickle",
    "TestObjModel.testConstants": "BOTTOM and its kind are told by identity",
    "TestObjModel.testSafeFree": "freeing a constant does nothing",
    "TestMessageReduceScatter.testMessageBad": "another datatype is found by another error",
    "testCommLock": "looks into locks that mpi4py keeps for its own object calls",
    "F90": "Fortran's kinds are the predefined datatypes themselves",
    "Numba": "arrays on a GPU",
    "CuPy": "arrays on a GPU",
    "TestMessageVectorW.testMessageBad": "BOTTOM is refused",
    "TestMessageDLPackCPUBuf": "capsules that are wrong on purpose: here NumPy reads them",
    "testMessageBottom": "BOTTOM is refused",
    "Grequest": "generalised requests are not there",
    "TestErrhandlerWin.testCreate": "mpi4py has room for 32 functions; here there is no limit",
    "TestErrhandlerComm.testCreate": "mpi4py has room for 32 functions; here there is no limit",
    "TestObjModel.testHandle": "generalised requests are not there",
    "TestObjModel.testAHandleOf": "there are no C handles",
    "TestObjModel.testAddressOf": "there are no C handles",
    "TestObjModel.testSizeOf": "there are no C handles",
    "TestExcCommNull.testInterNull": "intercommunicators are not there",
    "TestHandleErrhandler": "error handlers have no numbers",
    "TestHandleInfo": "infos have no numbers",
    "testFintArray": "there is no Fortran",
    "TestHandleStatus.testFortran": "there is no Fortran",
    "TestStatus.testToMemory": "a status is no structure of C",
    "testCreateMany": "mpi4py has room for 32 functions; here there is no limit",
}
"""By a part of a test's name, why it is not run."""
