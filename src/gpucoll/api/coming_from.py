"""What programs of other libraries call, and what to write here: one table for all its readers.

The error of a name from another library reads it (`gpucoll.api.names_elsewhere`), and
``tools/coming_from.py`` writes the tables of ``docs/coming_from`` from it. The tests execute each
row. Nothing imports this module before it needs a row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

__all__ = ["LIBRARIES", "Row", "rows"]

LIBRARIES = (
    "mpi4py", "torch.distributed", "Horovod", "cupyx.distributed", "cupy.cuda.nccl", "nccl4py",
    "JAX",
)  # fmt: skip
"""The libraries of the table, in its order. If two have a name, the first one's row comes first."""


class Row(NamedTuple):
    """One line of the table."""

    library: str
    section: str
    names: tuple[str, ...]
    """The names of that library for which the row is the answer."""
    there: str
    """Python code of the other library."""
    here: str
    """Python code with the same meaning, or an empty string if there is none."""
    differs: str
    """What differs in meaning, or what to do instead: one clause, or an empty string."""
    tested: str
    """How far tests run the code of the other library: ``"equal"``, the results are compared with
    gpucoll's; ``"runs"``, it runs; ``"named"``, its names exist."""


@cache
def rows() -> tuple[Row, ...]:
    """Return the table, in its order."""
    found: list[Row] = []
    library = section = ""
    for line in _TABLE.strip().splitlines():
        if line.startswith("== "):
            library = line[3:]
        elif line.startswith("-- "):
            section = line[3:]
        elif line:
            words, there, here, differs, *tested = (part.strip() for part in line.split("|"))
            names = () if words == "-" else tuple(words.split())
            how = "named" if not here or library in _ONLY_NAMED else (tested or ["equal"])[0]
            found.append(Row(library, section, names, there, here, differs, how))
    return tuple(found)


_ONLY_NAMED = ("cupyx.distributed", "cupy.cuda.nccl", "nccl4py")

# One row a line: names | code there | code here | what differs [| tested, if not "equal"]. A name,
# "-", stands for none.
# Variables have one meaning in all rows; docs/coming_from/README.md lists them. In a row of several
# constants, the third column has one for each name.
_TABLE = """
== mpi4py
-- Start and end
MPI | from mpi4py import MPI | import gpucoll | | runs
COMM_WORLD Init Init_thread | comm = MPI.COMM_WORLD | comm = gpucoll.init() | a call that makes a communicator, not a constant; `gpucoll.Communicator.from_mpi(MPI.COMM_WORLD)` makes one beside MPI | runs
COMM_SELF | alone = MPI.COMM_SELF | alone = gpucoll.init(rank=0, world_size=1) | | runs
Finalize | MPI.Finalize() | comm.close() | `with gpucoll.init() as comm:` closes it at the end of the block | named
Get_rank | comm.Get_rank() | comm.rank | an attribute, not a call
Get_size | comm.Get_size() | comm.world_size | an attribute, not a call
size | comm.size | comm.world_size |
Abort | comm.Abort() | comm.abort() | raises `AbortedError` on every rank; processes end only if nothing catches it | named
Get_processor_name | MPI.Get_processor_name() | socket.gethostname() |
Wtime | MPI.Wtime() | time.perf_counter() | | runs
-- Collectives of arrays
Allreduce | comm.Allreduce(x, out, op) | comm.all_reduce(x, op, out=out) |
IN_PLACE | comm.Allreduce(MPI.IN_PLACE, x, op) | comm.all_reduce(x, op, out=x) | in all_gather and the like, x may be this rank's block of `out`
Iallreduce | comm.Iallreduce(x, out, op) | comm.all_reduce(x, op, out=out, async_op=True) | the Work that it returns has wait() and done()
Allreduce_init | comm.Allreduce_init(x, out, op) | comm.plan_all_reduce(x, op, out=out) | a plan is called, without Start and Wait; every collective of arrays has one
Reduce | comm.Reduce(x, out, op, root) | comm.reduce(x, op, root, out=out) | ranks other than the root get None
Ireduce | comm.Ireduce(x, out, op, root) | comm.reduce(x, op, root, out=out, async_op=True) | the Work that it returns has wait() and done()
Bcast | comm.Bcast(x, root) | comm.broadcast(x, root, out=x) | without `out=x` the result is a new array
Ibcast | comm.Ibcast(x, root) | comm.broadcast(x, root, out=x, async_op=True) | the Work that it returns has wait() and done()
Scatter | comm.Scatter(x, out, root) | comm.scatter(x, root, out=out) | x is divided along axis 0
Scatterv | comm.Scatterv([x, counts], out, root) | comm.scatter(x, root, counts=counts, out=out) | counts are rows of axis 0, on every rank; blocks have no displacements
Gather | comm.Gather(x, out, root) | comm.gather(x, root, out=out) | ranks other than the root get None
Iscatter | comm.Iscatter(x, out, root) | comm.scatter(x, root, out=out, async_op=True) | the Work that it returns has wait() and done()
Igather | comm.Igather(x, out, root) | comm.gather(x, root, out=out, async_op=True) | the Work that it returns has wait() and done()
Gatherv | comm.Gatherv(x, [out, counts], root) | comm.gather(x, root, counts=counts, out=out) | counts are rows of axis 0, on every rank; `counts="auto"` exchanges them
Allgather | comm.Allgather(x, out) | comm.all_gather(x, out=out) |
Iallgather | comm.Iallgather(x, out) | comm.all_gather(x, out=out, async_op=True) | the Work that it returns has wait() and done()
Allgatherv | comm.Allgatherv(x, [out, counts]) | comm.all_gather(x, counts=counts, out=out) | counts are rows of axis 0; `counts="auto"` exchanges them
Alltoall | comm.Alltoall(x, out) | comm.all_to_all(x, out=out) |
Ialltoall | comm.Ialltoall(x, out) | comm.all_to_all(x, out=out, async_op=True) | the Work that it returns has wait() and done()
Alltoallv | comm.Alltoallv([x, send_counts], [out, recv_counts]) | comm.all_to_all(x, send_counts=send_counts, recv_counts=recv_counts, out=out) | counts are rows of axis 0; without `recv_counts` the ranks exchange them
Reduce_scatter_block | comm.Reduce_scatter_block(x, out, op) | comm.reduce_scatter(x, op, out=out) |
Reduce_scatter | comm.Reduce_scatter(x, out, counts, op) | comm.reduce_scatter(x, op, counts=counts, out=out) | counts are rows of axis 0
Scan | comm.Scan(x, out, op) | comm.scan(x, op, out=out) |
Exscan exscan | comm.Exscan(x, out, op) | comm.exclusive_scan(x, op, out=out) | rank 0 gets the op's identity; with MPI its `out` is undefined
Barrier | comm.Barrier() | comm.barrier() | | runs
Ibarrier | comm.Ibarrier() | comm.barrier() | it waits; there is no asynchronous barrier | runs
-- Ops
SUM PROD MIN MAX BAND BOR BXOR LAND LOR LXOR | MPI.SUM, MPI.PROD, MPI.MIN, MPI.MAX, MPI.BAND, MPI.BOR, MPI.BXOR, MPI.LAND, MPI.LOR, MPI.LXOR | op="sum", op="prod", op="min", op="max", op="band", op="bor", op="bxor", op="land", op="lor", op="lxor" | | runs
Op | MPI.Op.Create(reduce_buffers) | gpucoll.ReduceOp.custom(function) | `function(a, b)` combines two elements and is compiled; MPI's gets buffers | runs
MINLOC | comm.allreduce((value, comm.rank), MPI.MINLOC) | comm.all_reduce_object((value, comm.rank), min) |
MAXLOC | comm.allreduce((value, comm.rank), MPI.MAXLOC) | comm.all_reduce_object((value, comm.rank), max) | of equal values it gives the last rank, and MPI the first
-- Collectives of objects
allreduce | comm.allreduce(value, op) | comm.all_reduce_object(value, function) | `function(left, right)` is Python's; for arrays and numbers comm.all_reduce(x, op) is faster
reduce | comm.reduce(value, op, root) | comm.all_reduce_object(value, function) | all ranks get the result; here `reduce` takes arrays and numbers
bcast | comm.bcast(value, root) | comm.broadcast_object(value, root) | for arrays and numbers comm.broadcast(x, root) is faster
scatter | comm.scatter(values, root) | comm.scatter_object(values, root) | here `scatter` takes arrays
gather | comm.gather(value, root) | comm.gather_object(value, root) | here `gather` takes arrays and numbers
allgather | comm.allgather(value) | comm.all_gather_object(value) | for arrays and numbers comm.all_gather(x) is faster
alltoall | comm.alltoall(values) | [row[comm.rank] for row in comm.all_gather_object(values)] | each rank gets all objects; for arrays comm.all_to_all(list_of_arrays) sends each only where it goes
scan | comm.scan(number, op) | comm.scan(number, op) | arrays and numbers only
-- Messages
Send Rsend Bsend | comm.Send(x, dest, tag) | comm.send(x, dest, tag) | up to 8 KiB are buffered; more waits for the receiver
Ssend | comm.Ssend(x, dest, tag) | comm.send(x, dest, tag, synchronous=True) |
Isend | comm.Isend(x, dest, tag) | comm.send(x, dest, tag, async_op=True) | the Work that it returns has wait() and done()
Recv | comm.Recv(out, source, tag) | comm.recv(out, source, tag) | the tag is 0 if omitted; MPI's is ANY_TAG
Irecv | comm.Irecv(out, source, tag) | comm.recv(out, source, tag, async_op=True) | the Work that it returns has wait() and done(); the tag is 0 if omitted, MPI's is ANY_TAG
Status | comm.Recv(out, source, tag, status); status.Get_count(MPI.DOUBLE) | comm.recv(out, source, tag, info=True)[1].count | the second result has source, tag, count, dtype and shape
Sendrecv | comm.Sendrecv(x, dest, tag, out, source, tag) | comm.send_recv(x, dest, source, out, tag=tag) | one tag for both messages
send | comm.send(value, dest, tag) | comm.send_object(value, dest, tag) | here `send` takes arrays and numbers
recv | comm.recv(None, source, tag) | comm.recv_object(source, tag) | here `recv` takes arrays and numbers; the tag is 0 if omitted, MPI's is ANY_TAG
ssend | comm.ssend(value, dest, tag) | comm.send_object(value, dest, tag, synchronous=True) |
isend | comm.isend(value, dest, tag) | comm.send_object(value, dest, tag, async_op=True) | the Work that it returns has wait() and done()
irecv | comm.irecv(None, source, tag) | comm.recv_object(source, tag, async_op=True) | the Work that it returns has wait() and done(); the tag is 0 if omitted, MPI's is ANY_TAG
sendrecv | received = comm.sendrecv(value, dest, tag, None, source, tag) | work = comm.send_object(value, dest, tag, async_op=True); received = comm.recv_object(source, tag); work.wait() | `send_recv` takes arrays and numbers
Probe | comm.Probe(source, tag) | comm.probe(source, tag) | returns a Message with source, tag, count, dtype and shape | runs
Iprobe iprobe | comm.Iprobe(source, tag) | comm.probe(source, tag, wait=False) | None if no message has come | runs
Mprobe mprobe | comm.Mprobe(source, tag).Recv(out) | comm.probe(source, tag).recv(out) | until `recv`, another receive may take the message
Send_init | comm.Send_init(x, dest, tag) | comm.plan_send(x, dest, tag) | a plan is called, without Start and Wait
Recv_init | comm.Recv_init(out, source, tag) | comm.plan_recv(out, source, tag) | a plan is called, without Start and Wait
Waitall | MPI.Request.Waitall([request]) | gpucoll.wait_all([work]) | returns the results
Waitany | MPI.Request.Waitany([request]) | gpucoll.wait_any([work]) | it stays the same work, and can be waited for again
-- Communicators
Split | comm.Split(color, key) | comm.split(color, key) | color None stands for MPI.UNDEFINED
Split_type | comm.Split_type(MPI.COMM_TYPE_SHARED) | comm.split(comm.all_gather_object(host).index(host)) | with `host = socket.gethostname()`
Create Create_group | comm.Create_group(comm.Get_group().Incl(ranks)) | comm.split(0 if comm.rank in ranks else None) | all ranks of comm call it; those outside get None; the others keep their order in comm
Dup dup Clone | comm.Dup() | comm.duplicate() |
Free Disconnect | comm.Free() | comm.close() | | named
Create_cart | grid = comm.Create_cart([rows, columns]) | row, column = comm.split(comm.rank // columns), comm.split(comm.rank % columns) | a communicator for each row and each column of the grid (examples/process_grid.py); neighbours exchange by send_recv (examples/halo_exchange.py) | runs
Shrink Revoke Agree | comm.Shrink() | comm.shrink() | after a lost rank; every other rank calls it, and no rank needs to revoke | named
-- Not here
Win Put Get Accumulate Fetch_and_op | win = MPI.Win.Allocate(size, comm=comm) | | `gpucoll.tables.Table` has rows that any rank pulls and adds to, `gpucoll.tables.Published` weights that any rank reads; `gpucoll.integrations.mpi4py` has windows for the ranks of a host
File | MPI.File.Open(comm, path) | | write a file for each rank, or gather first
PROC_NULL | comm.Send(x, MPI.PROC_NULL) | | a rank without a neighbour leaves the call out
Create_vector Create_struct Create_subarray | MPI.DOUBLE.Create_vector(count, length, stride) | | pass the view of the array, `x[:, 0]`, which is packed; structured dtypes move as they are
Create_intercomm | comm.Create_intercomm(leader, comm, remote) | | ranks of both groups stay in one communicator and send to each other there; `split` makes one for each group
Neighbor_allgather Neighbor_alltoall Create_graph Create_dist_graph_adjacent | comm.Neighbor_alltoall(x, out) | | use comm.send_recv(x, dest, source), or sends and receives in `with comm.group():`
Spawn Accept Connect | comm.Spawn(command) | | start all processes together; later ones call `gpucoll.join()`, and comm.grow() lets them in
Set_errhandler | comm.Set_errhandler(MPI.ERRORS_RETURN) | | errors are always exceptions

== torch.distributed
-- Start and end
init_process_group | dist.init_process_group("gloo") | comm = gpucoll.init() | every rank is found by its launcher; there is no default group, so that calls are methods of comm | named
destroy_process_group | dist.destroy_process_group() | comm.close() | | named
is_initialized | dist.is_initialized() | not comm.is_closed |
get_rank | dist.get_rank() | comm.rank |
get_world_size | dist.get_world_size() | comm.world_size |
get_backend | dist.get_backend() | comm.describe() | it says what was chosen, and why | runs
TCPStore FileStore | dist.TCPStore(host, port, world_size) | | no store is needed: gpucoll.init() brings the ranks together
-- Collectives of tensors
all_reduce | dist.all_reduce(x, op) | comm.all_reduce(x, op, out=x) | without `out=x` the result is a new tensor, and x stays
- | work = dist.all_reduce(x, op, async_op=True); work.wait() | work = comm.all_reduce(x, op, out=x, async_op=True); work.wait() | `work.is_completed()` is `work.done()`; `work.wait()` also returns the result
all_reduce_coalesced | dist.all_reduce_coalesced(tensors, op) | comm.all_reduce(tensors, op, out=tensors) | a list is one fused call for each dtype
reduce | dist.reduce(x, root, op) | comm.reduce(x, op, root, out=x) | the op comes before the root; on the other ranks x stays
broadcast | dist.broadcast(x, root) | comm.broadcast(x, root, out=x) | without `out=x` the result is a new tensor
all_gather | dist.all_gather(blocks, x) | comm.all_gather(x, out=blocks) | blocks may differ in their rows
all_gather_into_tensor all_gather_single | dist.all_gather_into_tensor(out, x) | comm.all_gather(x, out=out) |
gather | dist.gather(x, blocks, root) | comm.gather(x, root, out=blocks) | without `out` the root gets one tensor, the blocks one below the other
scatter | dist.scatter(out, blocks, root) | comm.scatter(blocks, root, out=out) | the root may pass one tensor, which is divided along axis 0
reduce_scatter | dist.reduce_scatter(out, blocks, op) | comm.reduce_scatter(blocks, op, out=out) |
reduce_scatter_tensor reduce_scatter_single | dist.reduce_scatter_tensor(out, x, op) | comm.reduce_scatter(x, op, out=out) |
all_to_all | dist.all_to_all(blocks, parcels) | comm.all_to_all(parcels, out=blocks) |
all_to_all_single | dist.all_to_all_single(out, x) | comm.all_to_all(x, out=out) |
- | dist.all_to_all_single(out, x, recv_counts, send_counts) | comm.all_to_all(x, send_counts=send_counts, recv_counts=recv_counts, out=out) | without `recv_counts` the ranks exchange them
barrier | dist.barrier() | comm.barrier() | | runs
monitored_barrier | dist.monitored_barrier(timeout=timedelta(seconds=timeout_s)) | comm.barrier(timeout_s=timeout_s) | its error names the late ranks, as that of every call does | runs
-- Ops
SUM PRODUCT MIN MAX BAND BOR BXOR | dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR | op="sum", op="prod", op="min", op="max", op="band", op="bor", op="bxor" | | runs
AVG | dist.ReduceOp.AVG | op="avg" | also for CPU tensors, for which Gloo refuses it | runs
PREMUL_SUM | dist.ReduceOp.PREMUL_SUM | op=gpucoll.ReduceOp.scaled_sum(factor) | | runs
-- Objects
broadcast_object_list | dist.broadcast_object_list(values, root) | values = comm.broadcast_object(values, root) | the object is returned; no list is filled
all_gather_object | dist.all_gather_object(values, value) | values = comm.all_gather_object(value) | the list is returned
gather_object | dist.gather_object(value, values, root) | values = comm.gather_object(value, root) | the list is returned on the root, None elsewhere
scatter_object_list | dist.scatter_object_list(filled, values, root) | filled = [comm.scatter_object(values, root)] | this rank's object is returned
send_object_list recv_object_list | dist.send_object_list(values, dest) | comm.send_object(values, dest) | `recv_object` returns what was sent | named
-- Messages
send | dist.send(x, dest, tag=tag) | comm.send(x, dest, tag) | up to 8 KiB are buffered; more waits for the receiver
recv | dist.recv(out, source, tag=tag) | comm.recv(out, source, tag) | without a source, from any rank, in both; `info=True` says which
isend | dist.isend(x, dest, tag=tag) | comm.send(x, dest, tag, async_op=True) | the Work that it returns has wait() and done()
irecv | dist.irecv(out, source, tag=tag) | comm.recv(out, source, tag, async_op=True) | the Work that it returns has wait() and done()
P2POp batch_isend_irecv | works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, dest), dist.P2POp(dist.irecv, out, source)]); [work.wait() for work in works] | with comm.group(): comm.send(x, dest), comm.recv(out, source) | one send and one receive are also comm.send_recv(x, dest, source, out)
-- Groups
new_group split_group | group = dist.new_group(ranks) | group = comm.split(0 if comm.rank in ranks else None) | calls are methods of group; roots and peers are ranks of the group, not of the whole job | runs
new_subgroups | dist.new_subgroups(columns) | comm.split(comm.rank // columns) | groups of as many neighbouring ranks | runs
init_device_mesh | init_device_mesh("cpu", (rows, columns)) | row, column = comm.split(comm.rank // columns), comm.split(comm.rank % columns) | a communicator for each row and each column of the mesh | runs
get_process_group_ranks get_global_rank | dist.get_process_group_ranks(group) | group.all_gather(comm.rank) | a communicator does not know the ranks of the one that it was split from
-- Not here
DistributedDataParallel FullyShardedDataParallel DTensor | DistributedDataParallel(model) | | keep the program, and write dist.init_process_group("gpucoll")
- | torch.distributed.nn.functional.all_reduce(x) | | calls of comm have no gradients; those of torch on `init_process_group("gpucoll")` do

== Horovod
-- Start and end
- | hvd.init() | comm = gpucoll.init() | | runs
shutdown | hvd.shutdown() | comm.close() | | named
rank | hvd.rank() | comm.rank | an attribute, not a call
size | hvd.size() | comm.world_size | an attribute, not a call
local_rank local_size | hvd.local_rank() | host_ranks = comm.split(comm.all_gather_object(host).index(host)); host_ranks.rank | with `host = socket.gethostname()`
-- Collectives
allreduce | hvd.allreduce(x, op=op) | comm.all_reduce(x, op) | without an op Horovod averages, and gpucoll adds up
allreduce_ | hvd.allreduce_(x, op=op) | comm.all_reduce(x, op, out=x) | without an op Horovod averages, and gpucoll adds up
allreduce_async allreduce_async_ | handle = hvd.allreduce_async(x, op=op); out = hvd.synchronize(handle) | work = comm.all_reduce(x, op, async_op=True); out = work.wait() | without an op Horovod averages, and gpucoll adds up; calls are matched by their order, not by name
poll | hvd.poll(handle) | work.done() | | runs
grouped_allreduce | hvd.grouped_allreduce(tensors, op=op) | comm.all_reduce(tensors, op) | without an op Horovod averages, and gpucoll adds up; a list is one fused call for each dtype
- | hvd.allreduce(x, op=op, compression=hvd.Compression.fp16) | comm.all_reduce(x, op, compression="float16") | also `"bfloat16"`, `"int8_block"` and `"float8_block"`
allgather | hvd.allgather(x) | comm.all_gather(x, counts="auto") | without `counts` every rank passes as many rows
broadcast | hvd.broadcast(x, root) | comm.broadcast(x, root) |
broadcast_ | hvd.broadcast_(x, root) | comm.broadcast(x, root, out=x) |
alltoall | hvd.alltoall(x, splits)[0] | comm.all_to_all(x, send_counts=send_counts) | no counts are returned
reducescatter | hvd.reducescatter(x, op=op) | comm.reduce_scatter(x, op) | without an op Horovod averages, and gpucoll adds up; rows that the ranks do not divide evenly need `counts`
barrier | hvd.barrier() | comm.barrier() | | runs
broadcast_object | hvd.broadcast_object(value, root) | comm.broadcast_object(value, root) |
allgather_object | hvd.allgather_object(value) | comm.all_gather_object(value) |
broadcast_parameters | hvd.broadcast_parameters(named_tensors, root) | comm.broadcast(tensors, root, out=tensors) | a list of arrays; parameters of PyTorch inside `torch.no_grad()`
Average Sum Min Max Product | hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product | op="avg", op="sum", op="min", op="max", op="prod" | | runs
add_process_set ProcessSet | hvd.add_process_set(ranks) | comm.split(0 if comm.rank in ranks else None) | calls are methods of the new communicator | runs
-- Not here
DistributedOptimizer DistributedGradientTape | hvd.DistributedOptimizer(optimizer) | | keep the program (gpucoll.integrations.horovod), or reduce gradients by comm.all_reduce(gradients, "avg", out=gradients)
broadcast_optimizer_state | hvd.broadcast_optimizer_state(optimizer, root) | | write `optimizer.load_state_dict(comm.broadcast_object(optimizer.state_dict(), root))`
join | hvd.join() | | ranks decide together when to end: reduce a flag in each step | runs
Adasum | hvd.allreduce(x, op=hvd.Adasum) | | gpucoll.integrations.horovod has it

== cupyx.distributed
-- Start and end
init_process_group | comm = cupyx.distributed.init_process_group(world_size, rank) | comm = gpucoll.init() | ranks, their number and their meeting point come from the launcher
stop | comm.stop() | comm.close() |
-- Calls
all_reduce | comm.all_reduce(x, out, "sum") | comm.all_reduce(x, "sum", out=out) | sparse matrices are refused
reduce | comm.reduce(x, out, root, "sum") | comm.reduce(x, "sum", root, out=out) | the op comes before the root
broadcast | comm.broadcast(x, root) | comm.broadcast(x, root, out=x) | without `out=x` the result is a new array
all_gather | comm.all_gather(x, out, count) | comm.all_gather(x, out=out) | no count: the whole of x
gather | comm.gather(x, out, root) | comm.gather(x, root, out=out) |
scatter | comm.scatter(x, out, root) | comm.scatter(x, root, out=out) |
reduce_scatter | comm.reduce_scatter(x, out, count, "sum") | comm.reduce_scatter(x, "sum", out=out) | no count
all_to_all | comm.all_to_all(x, out) | comm.all_to_all(x, out=out) |
send | comm.send(x, dest) | comm.send(x, dest) |
recv | comm.recv(out, source) | comm.recv(out, source) |
send_recv | comm.send_recv(x, out, dest) | comm.send_recv(x, dest, dest, out) | receiver and sender may be different ranks
barrier | comm.barrier() | comm.barrier() |

== cupy.cuda.nccl
-- Start and end
get_unique_id | uid = nccl.get_unique_id() | | not needed: gpucoll.init() brings the ranks together
NcclCommunicator | comm = nccl.NcclCommunicator(world_size, uid, rank) | comm = gpucoll.init() | ranks and their number come from the launcher
initAll | comms = nccl.NcclCommunicator.initAll(devices) | | one process for each GPU: gpucoll-run starts them
rank_id | comm.rank_id() | comm.rank | an attribute, not a call
size | comm.size() | comm.world_size | an attribute, not a call
device_id | comm.device_id() | comm.describe() | arrays say which GPU they are on
check_async_error | comm.check_async_error() | comm.check() | waits for calls on GPU arrays, and raises
destroy | comm.destroy() | comm.close() |
abort | comm.abort() | comm.abort() | every rank raises `AbortedError`
-- Calls
allReduce | comm.allReduce(x_address, out_address, size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream) | comm.all_reduce(x, "sum", out=out) | arrays instead of addresses, counts and dtypes; the current stream, or `stream=`
reduce | comm.reduce(x_address, out_address, size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, root, stream) | comm.reduce(x, "sum", root, out=out) |
broadcast bcast | comm.bcast(x_address, size, nccl.NCCL_FLOAT64, root, stream) | comm.broadcast(x, root, out=x) |
allGather | comm.allGather(x_address, out_address, size, nccl.NCCL_FLOAT64, stream) | comm.all_gather(x, out=out) |
reduceScatter | comm.reduceScatter(x_address, out_address, size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, stream) | comm.reduce_scatter(x, "sum", out=out) |
send | comm.send(x_address, size, nccl.NCCL_FLOAT64, dest, stream) | comm.send(x, dest) |
recv | comm.recv(out_address, size, nccl.NCCL_FLOAT64, source, stream) | comm.recv(out, source) |
groupStart groupEnd | nccl.groupStart(); comm.send(x_address, size, nccl.NCCL_FLOAT64, dest, stream); comm.recv(out_address, size, nccl.NCCL_FLOAT64, source, stream); nccl.groupEnd() | with comm.group(): comm.send(x, dest), comm.recv(out, source) |
commSplit | comm.commSplit(color, key) | comm.split(color, key) | color None instead of -1

== nccl4py
-- Start and end
get_unique_id UniqueId | uid = nccl.get_unique_id() | | not needed: gpucoll.init() brings the ranks together
Communicator | comm = nccl.Communicator.init(world_size, rank, uid) | comm = gpucoll.init() | ranks and their number come from the launcher
nranks | comm.nranks | comm.world_size |
device | comm.device | comm.describe() | arrays say which GPU they are on
get_async_error get_last_error | comm.get_async_error() | comm.check() | waits for calls on GPU arrays, and raises
finalize destroy | comm.destroy() | comm.close() |
revoke | comm.revoke() | comm.abort() | every rank raises `AbortedError`
-- Calls
allreduce | comm.allreduce(x, out, nccl.SUM) | comm.all_reduce(x, "sum", out=out) |
reduce | comm.reduce(x, out, nccl.SUM, root) | comm.reduce(x, "sum", root, out=out) | without a root, nccl4py reduces on all ranks and gpucoll on rank 0
broadcast | comm.broadcast(x, x, root) | comm.broadcast(x, root, out=x) |
allgather | comm.allgather(x, out) | comm.all_gather(x, out=out) |
gather | comm.gather(x, out, root) | comm.gather(x, root, out=out) |
scatter | comm.scatter(x, out, root) | comm.scatter(x, root, out=out) |
reduce_scatter | comm.reduce_scatter(x, out, nccl.SUM) | comm.reduce_scatter(x, "sum", out=out) |
alltoall | comm.alltoall(x, out) | comm.all_to_all(x, out=out) |
send | comm.send(x, dest) | comm.send(x, dest) |
recv | comm.recv(out, source) | comm.recv(out, source) |
group_start group_end | with nccl.group(): comm.send(x, dest), comm.recv(out, source) | with comm.group(): comm.send(x, dest), comm.recv(out, source) | a method of comm
create_pre_mul_sum | op = comm.create_pre_mul_sum(factor) | op = gpucoll.ReduceOp.scaled_sum(factor) | no communicator is needed
-- Communicators and memory
split | comm.split(color, key) | comm.split(color, key) | color None for a rank that is left out
shrink | comm.shrink([lost]) | comm.shrink() | the ranks find out together which are lost
grow | comm.grow(world_size, uid) | comm.grow() | new ranks call `gpucoll.join()`; no id is passed on
mem_alloc | nccl.mem_alloc(size) | comm.empty(shape, like=x) | an array in memory that is registered with NCCL
register_buffer register_window | comm.register_buffer(x) | comm.register(x) | `comm.empty(shape, like=x, symmetric=True)` is in a window
-- Not here
put_signal wait_signal signal | comm.put_signal(x, dest, window) | | send and receive in `with comm.group():`
suspend resume | comm.suspend() | | close the communicator, and make another

== JAX
-- Start and end
- | jax.distributed.initialize() | comm = gpucoll.init() | to keep the program, GPUCOLL_JAX=1 gpucoll-run -n 4 script.py | named
process_index | jax.process_index() | comm.rank |
process_count | jax.process_count() | comm.world_size |
-- Inside jit, shard_map and pmap
psum | jax.lax.psum(x, "i") | gcj.all_reduce(x) | ranks are processes and need no axis name; for a gradient see `gradient=`
pmean | jax.lax.pmean(x, "i") | gcj.all_reduce(x, "avg") |
pmax | jax.lax.pmax(x, "i") | gcj.all_reduce(x, "max") |
pmin | jax.lax.pmin(x, "i") | gcj.all_reduce(x, "min") |
all_gather | jax.lax.all_gather(x, "i", tiled=True) | gcj.all_gather(x) | as with `tiled=True`; JAX's default adds an axis
psum_scatter | jax.lax.psum_scatter(x, "i", tiled=True) | gcj.reduce_scatter(x) | as with `tiled=True`
all_to_all | jax.lax.all_to_all(x, "i", 0, 0, tiled=True) | gcj.all_to_all(x) | along axis 0
ppermute pshuffle | jax.lax.ppermute(x, "i", [(0, 1), (1, 0)]) | gcj.send_recv(x, dest, source) | each rank names its own two peers, as Python's ints
axis_index | jax.lax.axis_index("i") | comm.rank | a Python int, known when the function is traced
axis_size | jax.lax.axis_size("i") | comm.world_size |
-- Between processes
sync_global_devices | multihost_utils.sync_global_devices("name") | comm.barrier() | | runs
process_allgather | multihost_utils.process_allgather(x, tiled=True) | comm.all_gather(x) | as with `tiled=True`; x is an array, not a tree
broadcast_one_to_all | multihost_utils.broadcast_one_to_all(x) | comm.broadcast(x) | comm.broadcast_object(tree) takes a tree
assert_equal | multihost_utils.assert_equal(x) | assert all(np.array_equal(x, each) for each in comm.all_gather_object(x)) | | runs
-- Not here
host_local_array_to_global_array make_array_from_process_local_data | jax.make_array_from_process_local_data(sharding, x) | | no array spans processes: each rank has its own, and calls say what goes where
"""  # noqa: E501
