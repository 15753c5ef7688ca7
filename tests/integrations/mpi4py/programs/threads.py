"""Calls of several threads at once, the first ones included. Runs on mpi4py, too."""

import threading
import time

import numpy as np
from mpi4py import MPI

N_THREADS, N_ROUNDS = 4, 30
comm = MPI.COMM_WORLD
rank, size = comm.Get_rank(), comm.Get_size()
assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
right, left = (rank + 1) % size, (rank - 1) % size
errors = []


def in_threads(function, count=N_THREADS):
    def run(number):
        try:
            function(number)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


# COMM_SELF is the same for all that use it first.
def to_myself(number):
    request = MPI.COMM_SELF.isend(number, 0, number)
    assert MPI.COMM_SELF.recv(source=0, tag=number) == number
    request.wait()


in_threads(to_myself)

# Every way to send, to receive and to look, in each thread with a tag of its own.
sends = [
    lambda x, tag: comm.Send(x, right, tag),
    lambda x, tag: comm.Ssend(x, right, tag),
    lambda x, tag: comm.Isend(x, right, tag).Wait(),
]


def receive(x, tag):
    comm.Recv(x, left, tag)


def receive_with_status(x, tag):
    status = MPI.Status()
    comm.Recv(x, left, tag, status)
    assert (status.source, status.tag, status.Get_count(MPI.DOUBLE)) == (left, tag, len(x))


def probe_first(x, tag):
    status = MPI.Status()
    comm.Probe(left, tag, status)
    assert status.Get_count(MPI.DOUBLE) == len(x)
    comm.Recv(x, left, tag)


def look_first(x, tag):
    while not comm.Iprobe(left, tag):
        time.sleep(1e-4)
    comm.Recv(x, left, tag)


def take(x, tag):
    comm.Mprobe(left, tag).Recv(x)


def take_if_it_is_there(x, tag):
    while (message := comm.Improbe(left, tag)) is None:
        time.sleep(1e-4)
    message.Recv(x)


receives = [receive, receive_with_status, probe_first, look_first, take, take_if_it_is_there]


def exchange(number):
    for turn in range(N_ROUNDS):
        for count in (3, 2000):
            x, out = np.full(count, 100.0 * number + turn), np.zeros(count)
            # Who sends first must not wait for who does, too.
            sending = threading.Thread(target=sends[(turn + number) % 3], args=(x, number))
            sending.start()
            receives[(turn + number) % len(receives)](out, number)
            sending.join()
            assert out.tolist() == x.tolist()
        request = comm.isend({"turn": turn}, right, number)
        assert comm.recv(source=left, tag=number) == {"turn": turn}
        request.wait()


in_threads(exchange)

# A message that is too large is lost, whatever other threads wait for.
waiting = threading.Thread(target=lambda: comm.recv(source=left, tag=98))
waiting.start()
time.sleep(0.05)
sent = comm.Isend(np.zeros(9), right, 99)
try:
    comm.Recv(np.zeros(2), left, 99)
except MPI.Exception as error:
    assert error.Get_error_class() == MPI.ERR_TRUNCATE
else:
    raise AssertionError("it does not fit")
sent.Wait()
comm.send(None, right, 97)
comm.Probe(left, 97)
assert comm.mprobe(left, 97).recv() is None
comm.send(None, right, 98)
waiting.join()

# Each of many is taken once, by whichever thread is first.
taken = []


def take_some(_):
    while len(taken) < N_ROUNDS:
        message = comm.improbe(left, 50)
        if message is not None:
            taken.append(message.recv())


requests = [comm.isend(number, right, 50) for number in range(N_ROUNDS)]
in_threads(take_some)
MPI.Request.waitall(requests)
assert sorted(taken) == list(range(N_ROUNDS))
comm.Barrier()
print("done", flush=True)
