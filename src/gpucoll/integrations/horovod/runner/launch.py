"""The command ``horovodrun``."""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import shlex
import signal
import sys
import textwrap
from collections.abc import Mapping, Sequence

from gpucoll import LaunchError, config
from gpucoll.integrations import horovod
from gpucoll.integrations.horovod.runner import driver
from gpucoll.integrations.horovod.runner.discovery import Discovery
from gpucoll.integrations.horovod.runner.flags import parse_args, set_env_from_args
from gpucoll.integrations.horovod.runner.hosts import hosts_of, is_local
from gpucoll.integrations.horovod.runner.ranks import LocalJob, Slot, assigned, with_door
from gpucoll.integrations.horovod.runner.remote import run_on_hosts
from gpucoll.integrations.horovod.settings import settings_of
from gpucoll.launcher.arguments import Options, which
from gpucoll.launcher.cli import DESCRIPTORS, open_standard_streams, say
from gpucoll.launcher.job import compile_kernels, obstacle_to

__all__ = ["main", "parse_args", "run_commandline"]

FAILED = "Horovod detected that one or more processes exited with non-zero status"


def check_build() -> str:
    """Return what ``horovodrun --check-build`` shows."""
    here = {
        name: "X" if importlib.util.find_spec(name) else " "
        for name in ("tensorflow", "torch", "mxnet", "keras")
    }
    gpu = "X" if any(os.path.exists(path) for path in ("/dev/nvidiactl", "/dev/kfd")) else " "
    return textwrap.dedent(
        f"""\
        Horovod v{horovod.__version__}, by gpucoll:

        Available Frameworks:
            [{here["tensorflow"]}] TensorFlow
            [{here["torch"]}] PyTorch
            [{here["mxnet"]}] MXNet
            [{here["keras"]}] Keras

        Available Controllers:
            [ ] MPI
            [X] Gloo (gpucoll)

        Available Tensor Operations:
            [{gpu}] NCCL
            [ ] DDL
            [ ] CCL
            [ ] MPI
            [X] Gloo (gpucoll)"""
    )


def options_of(args: argparse.Namespace, ranks: int) -> Options:
    """Return the options of gpucoll's launcher."""
    command = with_door(args.command)
    program = which(command[0])
    if program is None:
        raise ValueError(f"no such program: {command[0]}")
    if obstacle := obstacle_to(ranks, DESCRIPTORS):
        raise ValueError(obstacle)
    bind = "auto" if config.binding_allowed() else "none"
    return Options(ranks, bind, True, None, config.grace_s(), [program, *command[1:]])


def _prepare(args: argparse.Namespace, slots: Sequence[Slot]) -> Options:
    options = options_of(args, len(slots))
    if args.verbose:
        say(f"horovodrun: {len(slots)} ranks of {shlex.join(options.command)}")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    compile_kernels(say)
    gc.freeze()
    return options


def _run_static(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    hosts = hosts_of(args.hosts, args.hostfile, args.num_proc)
    slots = assigned(hosts, args.num_proc)
    if len(slots) < args.num_proc:
        raise ValueError(
            f"Requested more processes ({args.num_proc}) than there are available slots "
            f"({len(slots)})"
        )
    if all(is_local(slot.host) for slot in slots):
        return LocalJob(args, _prepare(args, slots), slots, environment).execute()
    return run_on_hosts(args, slots, environment)


def _elastic(args: argparse.Namespace, environment: Mapping[str, str]) -> tuple[int, str]:
    """Run an elastic job; return its exit code, and why it has failed if no rank says so."""
    if args.host_discovery_script:
        discovery = Discovery(args.host_discovery_script, args.slots or 1)
    else:
        hosts = hosts_of(args.hosts, args.hostfile, args.num_proc)
        discovery = Discovery(None, hosts=hosts)
    limit_s = settings_of({**os.environ, **environment}).elastic_timeout_s
    hosts = discovery.wait_for(args.num_proc, limit_s, driver.DISCOVER_HOSTS_FREQUENCY_SECS)
    if far := [name for name in hosts if not is_local(name)]:
        raise ValueError(
            f"elastic ranks on other hosts ({', '.join(far)}) are not started from here: start "
            "gpucoll-run --elastic on each host (docs/fault_tolerance.md of gpucoll)"
        )
    options = _prepare(args, assigned(hosts, args.max_num_proc))
    job = driver.ElasticJob(args, options, environment, discovery, hosts)
    return job.execute(), job.failure


def _run_elastic(args: argparse.Namespace) -> None:
    """Run an elastic job: for callers of Horovod's runner, its own tests among them.

    Raises
    ------
    RuntimeError
        It has failed.
    """
    code, failure = _elastic(args, set_env_from_args({}, args))
    if code:
        raise RuntimeError(failure or f"{FAILED}: the job's exit code is {code}")


def _run(args: argparse.Namespace) -> int:
    """Run the job of a command line; return its exit code."""
    environment = set_env_from_args({}, args)
    settings_of({**os.environ, **environment})
    if args.host_discovery_script or args.min_num_proc:
        return _elastic(args, environment)[0]
    return _run_static(args, environment)


def run_commandline() -> int:
    """Run the command line of this process; return its exit code."""
    open_standard_streams()
    args = parse_args()
    if args.check_build:
        print(check_build())
        return 0
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (ValueError, LaunchError, OSError) as error:
        say(f"horovodrun: {error}")
        return 2


def main() -> None:
    """Run the command line, and end this process."""
    sys.exit(run_commandline())


if __name__ == "__main__":
    main()
