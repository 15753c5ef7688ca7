"""What measures: the command ``gpucoll-bench``.

::

    cli            the command: what to run, exit codes
    ├── arguments      the command line -> Options (argument_parser, argument_types: how it looks)
    ├── checks         what is refused before anything is measured
    ├── peers          the libraries to compare with: where they are, how they start
    ├── libraries      ... started, with their ranks or their programs
    ├── starts         how the ranks of each library come to be: processes, environment, CPUs
    ├── groups         the ranks of one library as processes of their own, commanded over a socket
    │   └── rank_processes    those processes, and what became of them
    ├── launched       the same for ranks that a launcher has started
    ├── measure        one size: check, calibrate, then the interleaved rounds
    │   └── estimates      samples -> time, ratio and its interval
    ├── programs       a program of a library, under the library's own launcher
    │   └── measure_programs  the interleaved runs of those: startup, memory
    ├── collectives    what each collective is called, moves and may be asked for
    ├── gpus           the GPUs that ranks are measured on
    ├── patterns       the same for what stands in a collective's place: asynchronous, objects...
    ├── results        what was measured, and its JSON
    ├── figures        what is measured that is no time: names, units
    ├── table          ... as nccl-tests' table
    ├── summary        ... and what the whole run comes to: medians, and where a peer wins
    ├── progress       the bar meanwhile
    ├── environment    the machine and the versions beside every figure
    └── report         JSON -> the tables of docs/performance.md

`rank` is what runs inside every rank, whatever its library: it imports nothing of gpucoll but
itself, because a peer's ranks run in an environment where gpucoll is not installed.
"""
