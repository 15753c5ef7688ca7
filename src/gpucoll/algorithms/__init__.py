"""Schedules between hosts as data: who sends which blocks to whom, and in which order.

Each algorithm is a pure function ``(rank, size, ...) -> list[Step]`` that returns the steps of one
rank. It contains no payload, starts no process and opens no socket. The code that runs a schedule
provides these; tests and `tools/schedules` run it without them. "Rank" here means the
index among the participants, 0 to size - 1; between hosts these are one process per host.

`steps` defines the parts of a schedule, `table` lists the algorithms, `choice` selects one of them,
and `cost` calculates the cost of one for a rank. ``python tools/schedules all_reduce --hosts
4`` prints a schedule. `shares` divides arrays, between hosts and elsewhere.
"""
