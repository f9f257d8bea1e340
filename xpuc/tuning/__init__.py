"""A tuning session: which knobs run a model's kernels fastest on a machine, measured there.

tasks.py      what there is to tune: the operations of a model or an artifact
candidates.py a candidate's library and how to call it; programs.py builds them
inputs.py     arrays for a task; cases.py: as its target lays them out
reference.py  what a task's kernels should make of its arrays
kernels.py    kernels on a board; boards.py: this machine, or others through TVM's RPC tracker
timing.py     candidates in turns with the incumbent, and what counts as faster
workbench.py  a task on a board: checked, then timed
search.py     which knobs to try next
trials.py     the log of what was measured, from which a session resumes
shares.py     how much of a step each task is
session.py    the whole on CPUs: budget, search, records
prefilter.py  candidates for a GPU judged by their code; device_programs.py compiles them
export.py     the best of them as a bundle (bundle.py), for a machine without a compiler
replay.py     a bundle measured on the GPU there (box.py); remote.py: on that of a board
recording.py  its results as records
report.py     what a session found, as a page; plots.py: its plots
"""
