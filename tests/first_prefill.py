"""What the VM asks the system for to compute a prompt: `first_prefill.py ARTIFACT` prints bytes.

That of TVM's pooled allocator, which gets its pages by posix_memalign and gives none back.
"""

from __future__ import annotations

import sys

from allocations import of_the_system

from xpuc.runtime.engine import Engine
from xpuc.runtime.model import load_model


def main(path: str) -> int:
    engine = Engine(load_model(path, threads=1, n_sequences=1))
    ids = [1 + i % 200 for i in range(engine.model.max_chunk)]
    with of_the_system(256) as asked:
        next(engine.teacher_forced(ids, chunk=len(ids)))
    return sum(each.size for each in asked if each.call == "posix_memalign")


if __name__ == "__main__":
    sys.stdout.write(f"{main(sys.argv[1])}\n")
