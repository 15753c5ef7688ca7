"""Time all_reduce between network namespaces that stand for hosts; gpucoll, Gloo, MPICH in turns.

    sudo python tools/measure_hosts.py --hosts 4 --rate 1gbit --gloo TORCH/bin/python \
        --mpich MPICH/bin/python

Each peer is a Python of an environment of its own: one with torch, one with mpi4py and mpich. The
namespaces are joined by a bridge; the rate of each is limited both ways (tbf), or not at all
without ``--rate``. In each round every library starts its ranks anew and measures all sizes; what
is printed is the median over the rounds of the slowest rank's median, in microseconds. Needs root
and iproute2.
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

SIZES = (8, 1024, 65536, 1 << 20, 4 << 20, 32 << 20)
NAME, ADDRESS = "gcm", "10.78.0"
LIMIT_S = 300
SECRET = secrets.token_hex(32)

RANK = """
import json, os, statistics, sys, time
import numpy as np
library, sizes = sys.argv[1], json.loads(sys.argv[2])
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if library == "gpucoll":
    import gpucoll
    comm = gpucoll.init(timeout_s=120)
    rank, barrier = comm.rank, comm.barrier
    reduce_with = lambda x, out: (lambda: comm.all_reduce(x, out=out))
elif library == "gloo":
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    barrier = dist.barrier
    def reduce_with(x, out):
        tensor = torch.from_numpy(out)
        return lambda: dist.all_reduce(tensor)
else:
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    rank, barrier = world.rank, world.Barrier
    reduce_with = lambda x, out: (lambda: world.Allreduce(x, out))
found = {}
for n_bytes in sizes:
    x, out = np.zeros(n_bytes // 4, np.float32), np.zeros(n_bytes // 4, np.float32)
    run, count = reduce_with(x, out), 100 if n_bytes <= 65536 else 5
    run(), run(), barrier()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    found[n_bytes] = 1e6 * statistics.median(times)
with open(f"{sys.argv[3]}/{library}.{rank}", "w") as file:
    json.dump(found, file)
"""


def run(*command: object) -> None:
    """Run a command of the system."""
    subprocess.run([str(part) for part in command], check=True)


@contextmanager
def hosts(count: int, rate: str | None) -> Iterator[None]:
    """Make namespaces that reach each other, and take them away again."""
    bridge = f"{NAME}br"
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for host in range(count):
            name, port = f"{NAME}{host}", f"{NAME}v{host}"
            run("ip", "netns", "add", name)
            run(*f"ip link add {port} type veth peer name eth0 netns {name}".split())
            run(*f"ip link set {port} master {bridge}".split())
            run("ip", "link", "set", port, "up")
            run(*f"ip -n {name} addr add {ADDRESS}.{host + 1}/24 dev eth0".split())
            for device in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", device, "up")
            if rate:
                shape = f"root tbf rate {rate} burst 128kb latency 20ms".split()
                run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth0", *shape)
                run("tc", "qdisc", "add", "dev", port, *shape)
        yield
    finally:
        for host in range(count):
            subprocess.run(["ip", "netns", "del", f"{NAME}{host}"], check=False)
        subprocess.run(["ip", "link", "del", bridge], check=False)


def start_ranks(library: str, python: str, options: argparse.Namespace, folder: Path) -> None:
    """Run one library's ranks to their end."""
    program = [python, "-c", RANK, library, json.dumps(SIZES), str(folder)]
    if library == "mpich":
        start_mpich(python, program, options, folder)
        return
    size = options.hosts * options.ranks
    processes = []
    for rank in range(size):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": f"{ADDRESS}.1",
            "MASTER_PORT": "29501",
            "GLOO_SOCKET_IFNAME": "eth0",
            "GPUCOLL_RANK": str(rank),
            "GPUCOLL_WORLD_SIZE": str(size),
            "GPUCOLL_JOB": "measure",
            "GPUCOLL_MEET": f"tcp://{ADDRESS}.1:29502",
            "GPUCOLL_SECRET": SECRET,
        }
        place = ["ip", "netns", "exec", f"{NAME}{rank // options.ranks}"]
        processes.append(subprocess.Popen([*place, *program], env=environment))
    codes = [process.wait(LIMIT_S) for process in processes]
    if any(codes):
        raise SystemExit(f"{library}: exit codes {codes}")


def start_mpich(python: str, program: list[str], options: argparse.Namespace, folder: Path) -> None:
    """Run MPICH's ranks: its launcher reaches a namespace as it would a host, by a stand-in."""
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
    environment = {**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0"}
    where = ["ip", "netns", "exec", f"{NAME}0"]
    size = str(options.hosts * options.ranks)
    command = [*where, *launch, str(remote), "-hosts", names, "-iface", "eth0", "-n", size]
    subprocess.run(
        [*command, python, str(script), *program[3:]],
        env=environment,
        check=True,
        timeout=LIMIT_S,
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=1, help="on each host")
    parser.add_argument("--rate", help="of each host's interface, as tc writes it: 1gbit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gloo", help="a Python with torch")
    parser.add_argument("--mpich", help="a Python with mpi4py and mpich")
    options = parser.parse_args()
    peers = {"gpucoll": sys.executable, "gloo": options.gloo, "mpich": options.mpich}
    times: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with hosts(options.hosts, options.rate):
        for _ in range(options.rounds):
            for library, python in peers.items():
                if python is None:
                    continue
                with tempfile.TemporaryDirectory() as name:
                    start_ranks(library, python, options, Path(name))
                    ranks = [
                        json.loads(path.read_text()) for path in Path(name).glob(f"{library}.*")
                    ]
                for n_bytes in SIZES:
                    times[library][n_bytes].append(max(rank[str(n_bytes)] for rank in ranks))
    print("bytes".rjust(10), *(library.rjust(12) for library in times), "bus Gbit/s of gpucoll")
    size = options.hosts * options.ranks
    for n_bytes in SIZES:
        row = [median(times[library][n_bytes]) for library in times]
        bus = 2 * (size - 1) / size * n_bytes * 8 / (row[0] * 1e3)
        print(str(n_bytes).rjust(10), *(f"{value:12.0f}" for value in row), f"{bus:12.3f}")


if __name__ == "__main__":
    main()
