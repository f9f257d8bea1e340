"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Put a text in place of a file. A reader never sees half, a full disk leaves the old one.

    What is no regular file, such as /dev/stdout, is written to.
    """
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # what a link leads to, not the link
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)  # noqa: PTH101 - a temporary file is its maker's alone
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
