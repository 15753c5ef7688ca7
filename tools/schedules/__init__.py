"""Schedules between hosts: printed, drawn, priced, simulated and proved.

``python tools/schedules all_reduce --hosts 4`` prints one. `gpucoll.algorithms` has the schedules.
"""
