"""Schedules between hosts as data: who sends which blocks to whom, in which order.

Each algorithm is a pure function ``(rank, size, ...) -> list[Step]`` that says what one rank does.
It holds no payload, starts no process and opens no socket: what runs a schedule brings those, and
tests and `gpucoll.algorithms.simulation` run it without them. "Rank" is here the place among those
who take part, 0 to size - 1; between hosts that is one process of each host.

`steps` says what a schedule is made of, `table` which algorithms there are, `choice` which of them
is taken, `cost` what one costs a rank. ``python -m gpucoll.algorithms all_reduce --hosts 4`` prints
one.
"""
