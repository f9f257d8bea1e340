"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import stat
import threading

import pytest
from file_limits import largest_file

from xpuc.files import write_whole


def test_a_file_is_replaced_and_its_folder_made(tmp_path):
    path = tmp_path / "new" / "f\N{SNOWMAN}"
    for text in ("one\n", "another \N{SNOWMAN}\n"):
        write_whole(path, text)
        assert path.read_text(encoding="utf-8") == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = tmp_path / "f"
    write_whole(path, "old")
    with largest_file(1000), pytest.raises(OSError, match="too large"):
        write_whole(path, "new" * 1000)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to("f")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "f").read_text() == "text"


def test_what_is_no_regular_file_is_written_to(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_whole(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()
