"""Run the parts of a bundle's plan.json one after the other, and write what each found as JSON.

    python measure.py BUNDLE OUT.json [SECONDS ALREADY SPENT]

A part is a command that prints JSON. It has a limit of its own, and what is left of the whole
one; that it fails is recorded, and the others go on. What is found so far is on disk after each
part. Exits with 1 if a part failed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_SAID = 20  # last lines of stderr that are kept of a failure


def main() -> int:
    bundle, out = Path(sys.argv[1]), Path(sys.argv[2])
    plan = json.loads((bundle / "plan.json").read_text())
    started = time.monotonic() - float(sys.argv[3] if len(sys.argv) > 3 else 0)
    found: dict[str, Any] = {"bundle": plan["about"], "parts": {}}
    for part in plan["parts"]:
        left = plan["limit_s"] - (time.monotonic() - started)
        found["parts"][part["name"]] = result = measured(part, bundle, min(part["limit_s"], left))
        found["total_s"] = round(time.monotonic() - started, 1)
        out.write_text(json.dumps(found, indent=1) + "\n")
        said = result.get("error", "ok")
        sys.stdout.write(f"{part['name']}: {said} ({result.get('seconds', 0)} s)\n")
        sys.stdout.flush()
    return int(any("error" in each for each in found["parts"].values()))


def measured(part: dict[str, Any], bundle: Path, limit_s: float) -> dict[str, Any]:
    """What the part's command prints, its seconds, and an `error` if it did not do well."""
    if limit_s <= 1:
        return {"error": "no time left"}
    start = time.monotonic()
    process = subprocess.Popen(
        part["command"], cwd=bundle, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
        code = process.returncode
        error = None if code in part.get("exit_codes", [0]) else f"exit code {code}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        error = f"not done after {limit_s:.0f} s"
    result: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1)}
    try:
        result["found"] = json.loads(stdout)
    except ValueError:
        error = error or "prints no JSON"
    if error is None and "expected" in part:
        error = _unlike(part["expected"], result["found"])
    if error is not None:
        result |= {"error": error, "said": stderr.splitlines()[-_SAID:]}
    return result


def _unlike(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    for key, want in expected.items():
        if found.get(key) != want:
            return f"{key} is {found.get(key)}, expected {want}"
    return None


if __name__ == "__main__":
    sys.exit(main())
