"""A tuning session: which knobs run a model's kernels fastest on a machine, measured there.

tasks.py      what there is to tune: the operations of a model or an artifact
inputs.py     arrays for a task; reference.py: what its kernels should make of them
programs.py   a candidate's library, and how it is called
boards.py     where candidates are measured: this machine, or others through TVM's RPC tracker
timing.py     candidates in turns with the incumbent, and what counts as faster
search.py     which knobs to try next
trials.py     the log of what was measured, from which a session resumes
shares.py     how much of a step each task is
session.py    the whole: budget, search, records
report.py     what a session found, as a page; plots.py: its plots
"""
