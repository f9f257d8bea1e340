"""How fast an artifact runs: alone, of what memory allows, and beside llama.cpp.

cases.py      what is measured, under llama-bench's names
ours.py       an artifact running a case
peer.py       llama.cpp running it, in a process of its own (peer_worker.py)
bandwidth.py  how fast this machine reads memory
session.py    the rounds, interleaved, and the rows they make
"""

from xpuc.bench.cases import Case, cases
from xpuc.bench.session import Row, Session

__all__ = ["Case", "Row", "Session", "cases"]
