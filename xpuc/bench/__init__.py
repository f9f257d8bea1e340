"""How fast an artifact runs: alone, of what memory allows, and beside llama.cpp.

cases.py      what is measured, under llama-bench's names
ours.py       an artifact running a case
peer.py       llama.cpp running it, in a process of its own (peer_worker.py)
bandwidth.py  how fast this machine reads memory
peak.py       how fast it multiplies bytes
launches.py   the kernels of a step, what they read and compute
profile.py    the time they take, of that which they need at least
session.py    the rounds, interleaved, and the rows they make
"""

from xpuc.bench.cases import Case, cases
from xpuc.bench.profile import Profile
from xpuc.bench.session import Row, Session

__all__ = ["Case", "Profile", "Row", "Session", "cases"]
