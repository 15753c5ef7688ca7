"""The command line of ``horovodrun``, and what it sets in the ranks' environment."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

from gpucoll import config
from gpucoll.integrations import horovod
from gpucoll.integrations.horovod.settings import LOG_LEVELS, variable_of

__all__ = ["parse_args", "set_env_from_args"]


class _Knob(NamedTuple):
    """A flag that sets a variable of the ranks."""

    section: str
    """Where it stands in a configuration file, and under which key."""
    key: str
    kind: Any
    """How its value is read; bool: it has none, and there is a flag that denies it."""
    variable: str
    help: str = argparse.SUPPRESS


_KNOBS = {
    "fusion-threshold-mb": _Knob("params", "", int, "FUSION_THRESHOLD", "most MB in one call"),
    "cycle-time-ms": _Knob("params", "", float, "CYCLE_TIME", "patience of the thread that drives"),
    "cache-capacity": _Knob("params", "", int, "CACHE_CAPACITY"),
    "hierarchical-allreduce": _Knob("params", "", bool, "HIERARCHICAL_ALLREDUCE"),
    "hierarchical-allgather": _Knob("params", "", bool, "HIERARCHICAL_ALLGATHER"),
    "torus-allreduce": _Knob("params", "", bool, "TORUS_ALLREDUCE"),
    "autotune": _Knob("autotune", "enabled", bool, "AUTOTUNE"),
    "autotune-log-file": _Knob("autotune", "log_file", str, "AUTOTUNE_LOG"),
    "autotune-warmup-samples": _Knob("autotune", "warmup_samples", int, "AUTOTUNE_WARMUP_SAMPLES"),
    "autotune-steps-per-sample": _Knob(
        "autotune", "steps_per_sample", int, "AUTOTUNE_STEPS_PER_SAMPLE"
    ),
    "autotune-bayes-opt-max-samples": _Knob(
        "autotune", "bayes_opt_max_samples", int, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES"
    ),
    "autotune-gaussian-process-noise": _Knob(
        "autotune", "gaussian_process_noise", float, "AUTOTUNE_GAUSSIAN_PROCESS_NOISE"
    ),
    "timeline-filename": _Knob("timeline", "filename", str, "TIMELINE", "file of a timeline"),
    "timeline-mark-cycles": _Knob("timeline", "mark_cycles", bool, "TIMELINE_MARK_CYCLES"),
    "no-stall-check": _Knob(
        "stall_check", "", bool, "STALL_CHECK_DISABLE", "do not warn of stalls"
    ),
    "stall-check-warning-time-seconds": _Knob(
        "stall_check", "warning_time_seconds", int, "STALL_CHECK_TIME_SECONDS"
    ),
    "stall-check-shutdown-time-seconds": _Knob(
        "stall_check", "shutdown_time_seconds", int, "STALL_SHUTDOWN_TIME_SECONDS"
    ),
    "mpi-threads-disable": _Knob("library_options", "", bool, "MPI_THREADS_DISABLE"),
    "num-nccl-streams": _Knob("library_options", "", int, "NUM_NCCL_STREAMS"),
    "thread-affinity": _Knob("library_options", "", int, "THREAD_AFFINITY"),
    "gloo-timeout-seconds": _Knob("library_options", "", int, "GLOO_TIMEOUT_SECONDS"),
    "log-level": _Knob("logging", "level", str, "LOG_LEVEL"),
    "elastic-timeout": _Knob("", "", int, "ELASTIC_TIMEOUT", "how long too few ranks wait"),
    "start-timeout": _Knob("", "", int, "START_TIMEOUT", "how long to wait for newcomers"),
}

_DENIALS = {"no-stall-check": "stall-check"}

_USAGE = "horovodrun -np N [-H HOST:SLOTS,...] [options] COMMAND..."
_HELP = """Start a program of Horovod on N ranks, over gpucoll.

Ranks on this host are started by gpucoll's launcher, those on other hosts by ssh. Options that
mean nothing here (of MPI, of autotuning and the like) are taken; ranks say once which."""


def _dest(option: str) -> str:
    return option.replace("-", "_")


def _add_knobs(parser: argparse.ArgumentParser) -> None:
    for option, knob in _KNOBS.items():
        if knob.kind is bool:
            denial = _DENIALS.get(option, f"no-{option}")
            either = parser.add_mutually_exclusive_group()
            either.add_argument(f"--{option}", action="store_true", default=None, help=knob.help)
            either.add_argument(
                f"--{denial}", dest=_dest(option), action="store_false", help=argparse.SUPPRESS
            )
        else:
            choices = LOG_LEVELS if option == "log-level" else None
            parser.add_argument(f"--{option}", type=knob.kind, choices=choices, help=knob.help)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "horovodrun",
        usage=_USAGE,
        description=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    quiet = argparse.SUPPRESS
    add("-v", "--version", action="version", version=horovod.__version__)
    add("-np", "--num-proc", type=int, help="number of ranks (at the start, of an elastic job)")
    add("-cb", "--check-build", action="store_true", help="show what there is, and end")
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument("-H", "--hosts", help="hosts and their slots: host1:2,host2:4")
    hosts.add_argument("-hostfile", "--hostfile", help="a file with lines: host1 slots=2")
    hosts.add_argument(
        "--host-discovery-script",
        help="a program that prints host:slots lines, asked again and again",
    )
    add("--min-np", "--min-num-proc", dest="min_num_proc", type=int, help="elastic: fewest ranks")
    add("--max-np", "--max-num-proc", dest="max_num_proc", type=int, help="elastic: most ranks")
    add("--slots-per-host", dest="slots", type=int, help="slots of hosts that name none")
    add("--reset-limit", type=int, help="elastic: how often ranks may change; then the job fails")
    add(
        "--blacklist-cooldown-range",
        dest="cooldown_range",
        type=int,
        nargs=2,
        metavar=("MIN", "MAX"),
        help="elastic: seconds that a failed host is left out; default: for ever",
    )
    add("--output-filename", help="folder for what each rank prints, as well")
    add("-prefix-timestamp", "--prefix-output-with-timestamp", action="store_true")
    add("--verbose", action="store_true", help="show the commands")
    add("--config-file", help="YAML file with these options")
    add("--network-interfaces", "--network-interface", dest="nics", action="append")
    add("-p", "--ssh-port", type=int)
    add("-i", "--ssh-identity-file")
    for controller in ("gloo", "mpi", "jsrun"):
        add(f"--{controller}", dest=f"use_{controller}", action="store_true", help=quiet)
    add("--disable-cache", action="store_true", help=quiet)
    add("--mpi-args", help=quiet)
    add("--tcp", dest="tcp_flag", action="store_true", help=quiet)
    add("--binding-args", help=quiet)
    for option in ("with", "without", "hide"):
        add(f"--log-{option}-timestamp", dest="log_with_timestamp", action="store_true", help=quiet)
    _add_knobs(parser)
    add("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line; if it is wrong, end the process with code 2."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.config_file:
        _read_config(args, parser)
    for option, knob in _KNOBS.items():
        value = getattr(args, _dest(option))
        if knob.kind in (int, float) and value is not None and value < 0:
            parser.error(f"{_dest(option)}={value} must be >= 0")
    if not args.check_build:
        if args.num_proc is None or args.num_proc < 1:
            parser.error("the following arguments are required: -np/--num-proc, a number above 0")
        if not args.command:
            parser.error("there is no command to run")
    args.run_func = args.executable = None
    return args


def _read_config(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Take over what a configuration file says and the command line does not."""
    try:
        yaml = importlib.import_module("yaml")
    except ModuleNotFoundError:
        parser.error("--config-file needs PyYAML: pip install pyyaml")
    try:
        with open(args.config_file, encoding="utf-8") as file:
            sections = yaml.safe_load(file) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        parser.error(f"--config-file {args.config_file} cannot be read: {error}")
    if not isinstance(sections, dict) or not all(
        isinstance(section, dict | None) for section in sections.values()
    ):
        parser.error(f"--config-file {args.config_file}: sections with options are expected")
    for option, knob in _KNOBS.items():
        value = (sections.get(knob.section) or {}).get(knob.key or _dest(option))
        if value is None or getattr(args, _dest(option)) is not None:
            continue
        try:
            setattr(args, _dest(option), knob.kind(value))
        except (TypeError, ValueError):
            kind = knob.kind.__name__
            parser.error(f"--config-file: {option} must be of type {kind}; got {value!r}")
    enabled = (sections.get("stall_check") or {}).get("enabled")
    if enabled is not None and args.no_stall_check is None:
        args.no_stall_check = not enabled


def set_env_from_args(
    env: MutableMapping[str, str], args: argparse.Namespace
) -> MutableMapping[str, str]:
    """Set what the command line sets for ranks; return the environment."""
    for option, knob in _KNOBS.items():
        value = getattr(args, _dest(option), None)
        if value is None:
            continue
        if option == "fusion-threshold-mb":
            value <<= 20
        env[variable_of(knob.variable)] = str(int(value) if knob.kind is bool else value)
    if args.nics:
        env[config.INTERFACES] = ",".join(args.nics)
    return env
