"""The measurement tool, ``gpucoll-bench``.

::

    cli            the command: what to run, exit codes
    ├── arguments      the command line -> Options (argument_parser, argument_types: its syntax)
    ├── checks         refuses what cannot be measured, before anything starts
    ├── peers          the libraries to compare with: where they are, how they start
    ├── libraries      starts these libraries, with their ranks or their programs
    ├── starts         how the ranks of each library start: processes, environment, CPUs
    ├── groups         the ranks of one library as child processes, commanded over a socket
    │   └── rank_processes    those processes, and how they ended
    ├── launched       the same for ranks that a launcher has started
    ├── measure        one size: check, calibrate, then the interleaved rounds
    │   └── estimates      samples -> time, ratio and its interval
    ├── programs       a program of a library, under the library's own launcher
    │   └── measure_programs  the interleaved runs of those: startup, memory
    ├── collectives    each collective: its names, what it moves, which options it takes
    ├── other_names    names of OSU's benchmarks and nccl-tests, and what differs
    ├── gpus           the GPUs that ranks are measured on
    ├── patterns       the same as collectives for patterns: asynchronous calls, objects...
    ├── results        the results, and their JSON
    ├── csv_results    the results as CSV
    ├── figures        results that are not times: names, units
    ├── table          the results as nccl-tests' table
    ├── summary        the outcome of a whole run: medians, and where a peer is faster
    ├── progress       what is measured now, how far the run is
    │   └── time_left      how long the rest takes
    ├── environment    the machine and the versions that belong to every figure
    └── COMMANDS       what is done with kept results
        ├── report         kept results -> tables, pictures, a page
        │   └── page           that page (page_assets: its style and script)
        ├── compare        two runs -> what became slower
        │   └── changes        which changes are real, and their intervals
        └── kept           reads what --json wrote, and takes several files as one

`rank` runs inside every rank of every library. It imports nothing else of gpucoll, because a peer's
ranks run in an environment where gpucoll is not installed.
"""

COMMANDS = {
    "report": "show kept results as tables, pictures or a page",
    "compare": "say what became slower between two runs",
}
"""Commands of ``gpucoll-bench`` that measure nothing. Each is a module here that has `main` and
`make_parser`."""
