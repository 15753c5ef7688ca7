"""Predict the time of collectives on many ranks: parameters fitted to a run, schedules simulated.

`simulation` runs the schedules of `gpucoll.algorithms` without processes, `composition` says which
of them a call over several hosts consists of, `fitting` finds the parameters of the network and of
the shared memory, `validation` measures how far predictions are from what was held out, and
`command` is ``gpucoll-bench --predict``. docs/prediction.md has the assumptions.
"""
