"""Starting ranks on this host: the program ``gpucoll-run`` and the function `gpucoll.launch`.

From the top down::

    cli, arguments      gpucoll-run; nodes, which of a job's ranks over several hosts it starts
    function            gpucoll.launch: launch_job (in the caller), function_rank (in the rank), and
                        call, what travels between them
    job                 what both give their ranks: an environment, CPUs, compiled kernels
    rank_set            all ranks of a job: started, watched, ended
    rank_process        one of them; exec_rank is what it runs before its own program
    output, signals, events, end_notices (which tell waiting ranks who has ended)
"""
