"""Time collectives between network namespaces as hosts: gpucoll, Gloo and MPICH in turns.

    sudo python tools/measure_hosts.py --hosts 4 --rate 1gbit --gloo TORCH/bin/python \
        --mpich MPICH/bin/python
    sudo python tools/measure_hosts.py --collectives broadcast,all_gather --sizes 1K,16M ...

Each peer is the Python of a separate environment: one with torch, one with mpi4py and mpich. The
namespaces are connected by a bridge. Each one's rate is limited in both directions (tbf), or
unlimited without ``--rate``. In each round every library starts its ranks again and measures all
sizes. The output has the median over the rounds of the slowest rank's median, in microseconds, and
the user and system time of all ranks together per GB (10**9 bytes) of array. Sizes are those of a
rank's larger array: the input of a reduce_scatter, the output of an all_gather. Needs root and
iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

NAME, ADDRESS = "gcm", "10.78.0"
LIMIT_S = 300
SECRET = secrets.token_hex(32)

RANK = """
import json, os, resource, statistics, sys, time
import numpy as np
library, cases = sys.argv[1], json.loads(sys.argv[2])
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if library == "gpucoll":
    import gpucoll
    comm = gpucoll.init(timeout_s=120)
    rank, size, barrier = comm.rank, comm.world_size, comm.barrier
    calls = {
        "all_reduce": lambda whole, other, block: lambda: comm.all_reduce(whole, out=other),
        "broadcast": lambda whole, other, block: lambda: comm.broadcast(whole, root=0, out=whole),
        "all_gather": lambda whole, other, block: lambda: comm.all_gather(block, out=whole),
        "all_to_all": lambda whole, other, block: lambda: comm.all_to_all(whole, out=other),
        "reduce_scatter": lambda whole, other, block: lambda: comm.reduce_scatter(whole, out=block),
    }
elif library == "gloo":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    barrier, tensor = dist.barrier, torch.from_numpy
    parts = lambda whole: list(tensor(whole).chunk(size))
    def all_to_all(whole, other, block):
        there, here = parts(whole), parts(other)
        def pairs():
            here[rank].copy_(there[rank])
            works = [dist.irecv(here[p], p) for p in range(size) if p != rank]
            works += [dist.isend(there[p], p) for p in range(size) if p != rank]
            for work in works:
                work.wait()
        return pairs
    calls = {
        "all_reduce": lambda whole, other, block: lambda: dist.all_reduce(tensor(other)),
        "broadcast": lambda whole, other, block: lambda: dist.broadcast(tensor(whole), 0),
        "all_gather": lambda whole, other, block: (
            lambda: dist.all_gather_into_tensor(tensor(whole), tensor(block))
        ),
        "all_to_all": all_to_all,
        "reduce_scatter": lambda whole, other, block: (
            lambda: dist.reduce_scatter_tensor(tensor(block), tensor(whole))
        ),
    }
else:
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    rank, size, barrier = world.rank, world.size, world.Barrier
    calls = {
        "all_reduce": lambda whole, other, block: lambda: world.Allreduce(whole, other),
        "broadcast": lambda whole, other, block: lambda: world.Bcast(whole, 0),
        "all_gather": lambda whole, other, block: lambda: world.Allgather(block, whole),
        "all_to_all": lambda whole, other, block: lambda: world.Alltoall(whole, other),
        "reduce_scatter": lambda whole, other, block: (
            lambda: world.Reduce_scatter_block(whole, block)
        ),
    }
found = []
for collective, n_bytes in cases:
    count = max(n_bytes // 4 // size, 1) * size if collective != "all_reduce" else n_bytes // 4
    whole, other = np.zeros(count, np.float32), np.zeros(count, np.float32)
    run, repeats = calls[collective](whole, other, np.zeros(count // size, np.float32)), 5
    if n_bytes <= 65536:
        repeats = 100
    run(), run(), barrier()
    times, before = [], resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found.append([1e6 * statistics.median(times), cpu_s / repeats / n_bytes * 1e9])
    barrier()
with open(f"{sys.argv[3]}/{library}.{rank}", "w") as file:
    json.dump(found, file)
"""


def run(*command: object) -> None:
    """Run a system command."""
    subprocess.run([str(part) for part in command], check=True)


@contextmanager
def hosts(
    count: int, rate: str | None, cards: int = 1, bucket: str = "burst 128kb latency 20ms"
) -> Iterator[None]:
    """Make namespaces that reach each other, and remove them afterwards.

    `bucket` is what tbf allows beyond the rate, in tc's notation.
    """
    try:
        for host in range(count):
            run("ip", "netns", "add", f"{NAME}{host}")
            run("ip", "-n", f"{NAME}{host}", "link", "set", "lo", "up")
        for card in range(cards):
            run("ip", "link", "add", f"{NAME}br{card}", "type", "bridge")
            run("ip", "link", "set", f"{NAME}br{card}", "up")
            for host in range(count):
                plug_in(host, card, rate and f"{rate} {bucket}")
        yield
    finally:
        links = [port_of(host, card) for host in range(count) for card in range(cards)]
        # The kernel would remove a namespace's links some time after the namespace.
        for link in [*links, *(f"{NAME}br{card}" for card in range(cards))]:
            subprocess.run(["ip", "link", "del", link], check=False)
        for host in range(count):
            subprocess.run(["ip", "netns", "del", f"{NAME}{host}"], check=False)


def port_of(host: int, card: int) -> str:
    """Return the name of the bridge's end of an interface."""
    return f"{NAME}v{host}c{card}"


def plug_in(host: int, card: int, rate: str | None) -> None:
    """Give a namespace an interface on a bridge."""
    name, port, device = f"{NAME}{host}", port_of(host, card), f"eth{card}"
    run(*f"ip link add {port} type veth peer name {device} netns {name}".split())
    run(*f"ip link set {port} master {NAME}br{card}".split())
    run("ip", "link", "set", port, "up")
    network = ADDRESS if card == 0 else f"{ADDRESS}{card}"
    run(*f"ip -n {name} addr add {network}.{host + 1}/24 dev {device}".split())
    run("ip", "-n", name, "link", "set", device, "up")
    if rate:
        shape = f"root tbf rate {rate}".split()
        run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", device, *shape)
        run("tc", "qdisc", "add", "dev", port, *shape)


def start_ranks(library: str, python: str, options: argparse.Namespace, folder: Path) -> None:
    """Run one library's ranks until they end."""
    program = [python, "-c", RANK, library, json.dumps(options.cases), str(folder)]
    if library == "mpich":
        start_mpich(python, program, options, folder)
        return
    size, cards = options.hosts * options.ranks, ",".join(devices(options))
    processes = []
    for rank in range(size):
        environment = {
            **rank_environment(rank, size, cards),
            "GPUCOLL_SOCKETS": str(options.sockets),
        }
        place = ["ip", "netns", "exec", f"{NAME}{rank // options.ranks}"]
        processes.append(subprocess.Popen([*place, *program], env=environment))
    codes = [process.wait(LIMIT_S) for process in processes]
    if any(codes):
        raise SystemExit(f"{library}: exit codes {codes}")


def rank_environment(rank: int, size: int, cards: str) -> dict[str, str]:
    """Return the environment of a rank, for gpucoll and for Gloo."""
    return {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": f"{ADDRESS}.1",
        "MASTER_PORT": "29501",
        "GLOO_SOCKET_IFNAME": cards,
        "GPUCOLL_INTERFACES": cards,
        "GPUCOLL_RANK": str(rank),
        "GPUCOLL_WORLD_SIZE": str(size),
        "GPUCOLL_JOB": "measure",
        "GPUCOLL_MEET": f"tcp://{ADDRESS}.1:29502",
        "GPUCOLL_SECRET": SECRET,
    }


def start_mpich(python: str, program: list[str], options: argparse.Namespace, folder: Path) -> None:
    """Run MPICH's ranks; a stand-in for ssh lets its launcher enter namespaces as hosts."""
    remote = folder / "remote"
    remote.write_text(
        "#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nhost=$1; shift\n"
        f'exec ip netns exec {NAME}$(( ${{host##*.}} - 1 )) unshare --uts bash -c "$*"\n'
    )
    remote.chmod(0o755)
    script = folder / "rank.py"
    script.write_text(RANK)
    names = ",".join(f"{ADDRESS}.{host + 1}:{options.ranks}" for host in range(options.hosts))
    launch = [str(Path(python).with_name("mpiexec")), "-launcher", "ssh", "-launcher-exec"]
    environment = {
        **os.environ,
        "UCX_TLS": "tcp,self",
        "UCX_NET_DEVICES": ",".join(devices(options)),
    }
    where = ["ip", "netns", "exec", f"{NAME}0"]
    size = str(options.hosts * options.ranks)
    command = [*where, *launch, str(remote), "-hosts", names, "-iface", "eth0", "-n", size]
    subprocess.run(
        [*command, python, str(script), *program[3:]], env=environment, check=True, timeout=LIMIT_S
    )


def devices(options: argparse.Namespace) -> list[str]:
    """Return the interfaces of each host."""
    return [f"eth{card}" for card in range(options.cards)]


def size_of(word: str) -> int:
    """Convert a size such as 8, 1K or 16M to bytes."""
    unit = {"K": 1 << 10, "M": 1 << 20}.get(word[-1].upper())
    return int(word[:-1]) * unit if unit else int(word)


def bus_factor(collective: str, size: int) -> float:
    """Return nccl-tests' factor between algorithm and bus bandwidth."""
    factors = {"all_reduce": 2 * (size - 1) / size, "broadcast": 1.0}
    return factors.get(collective, (size - 1) / size)


def read_options() -> argparse.Namespace:
    """Return the command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks on each host")
    parser.add_argument("--rate", help="rate of each host's interface, in tc's notation: 1gbit")
    parser.add_argument("--cards", type=int, default=1, help="number of interfaces of each host")
    parser.add_argument(
        "--sockets", type=int, default=1, help=("gpucoll's sockets over each interface")
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--collectives", default="all_reduce", help="between commas")
    parser.add_argument(
        "--sizes", default="8,1K,64K,1M,4M,32M", help=("in bytes, separated by commas")
    )
    parser.add_argument("--gloo", help="a Python with torch")
    parser.add_argument("--mpich", help="a Python with mpi4py and mpich")
    options = parser.parse_args()
    sizes = [size_of(word) for word in options.sizes.split(",")]
    options.cases = [(name, size) for name in options.collectives.split(",") for size in sizes]
    return options


def print_table(options: argparse.Namespace, found: dict[str, list[list[list[float]]]]) -> None:
    """Print a row for each case: times, processor time, bus bandwidth."""
    size, names = options.hosts * options.ranks, list(found)
    heads = [*names, *(f"CPU {name}" for name in names), "bus Gbit/s"]
    print("collective".rjust(14), "bytes".rjust(10), *(head.rjust(12) for head in heads))
    for number, (collective, n_bytes) in enumerate(options.cases):
        of_case = [[rounds[number] for rounds in found[name]] for name in names]
        times = [median(time for time, _ in rounds) for rounds in of_case]
        cpu = [median(cpu_s for _, cpu_s in rounds) for rounds in of_case]
        bus = bus_factor(collective, size) * n_bytes * 8 / (times[0] * 1e3)
        cells = [f"{value:12.0f}" for value in times] + [f"{value:12.2f}" for value in cpu]
        print(collective.rjust(14), str(n_bytes).rjust(10), *cells, f"{bus:12.3f}")


def main() -> None:
    """Measure, and print a table."""
    options = read_options()
    peers = {"gpucoll": sys.executable, "gloo": options.gloo, "mpich": options.mpich}
    found: dict[str, list[list[list[float]]]] = defaultdict(list)
    with hosts(options.hosts, options.rate, options.cards):
        for _ in range(options.rounds):
            for library, python in peers.items():
                if python is None:
                    continue
                with tempfile.TemporaryDirectory() as name:
                    start_ranks(library, python, options, Path(name))
                    paths = Path(name).glob(f"{library}.*")
                    by_rank = [json.loads(path.read_text()) for path in paths]
                cases = list(zip(*by_rank, strict=True))
                found[library].append(
                    [[max(t for t, _ in ranks), sum(c for _, c in ranks)] for ranks in cases]
                )
    print_table(options, found)


if __name__ == "__main__":
    main()
