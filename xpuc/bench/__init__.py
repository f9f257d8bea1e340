"""How fast an artifact runs: alone, of what memory allows, and beside llama.cpp; and its engine.

cases.py      what is measured, under llama-bench's names
ours.py       an artifact running a case
peer.py       llama.cpp running it, in a process of its own (peer_worker.py)
roofs.py      how fast this machine reads memory and multiplies bytes
launches.py   the kernels of a step, what they read and compute
profile.py    the time they take, of that which they need at least
explain.py    an operation's, beside what its manifest says of it
predict.py    a decode step's on a GPU that is not at hand
session.py    the rounds, interleaved, and the rows they make

engine_session.py  the rounds of what requests notice of an engine:
overhead.py        what a step costs beside the model
workload.py        the requests of a load
load.py            how long they wait, and whether all end and nothing leaks
saving.py          what a block store costs meanwhile
stall.py           what a stream notices of a long prompt
reuse.py           the first token of a prompt whose beginning is known
quantiles.py       p50, p90, p99
subject.py         the artifact, and how an engine is opened on it
"""

from xpuc.bench.cases import Case, cases
from xpuc.bench.profile import Profile
from xpuc.bench.session import Row, Session

__all__ = ["Case", "Profile", "Row", "Session", "cases"]
