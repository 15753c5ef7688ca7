"""Start of ranks on this host: the program ``gpucoll-run`` and the function `gpucoll.launch`.

From the top down::

    cli, arguments      gpucoll-run; nodes chooses which ranks of a job over several hosts it starts
    function            gpucoll.launch: launch_job runs in the caller, function_rank in each rank,
                        and call defines what travels between them
    job                 prepares the ranks of both: an environment, CPUs, compiled kernels
    rank_set            starts, watches and ends all ranks of a job
    rank_process        one rank; exec_rank sets the process up before its program
    output, signals, events, end_notices (which tell waiting ranks which ranks have ended)
"""
