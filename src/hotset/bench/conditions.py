"""Under which conditions numbers were measured: without them a number is an anecdote."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hotset


def conditions() -> dict[str, Any]:
    """Version, commit, command line, Python, time and load of this moment."""
    return {
        "hotset": hotset.__version__,
        "commit": commit(),
        "command": sys.argv,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": list(os.getloadavg()),
    }


def commit() -> str | None:
    """The git commit of the source tree this package runs from, with ``-dirty`` when files of it were changed.

    ``None`` for an installed copy, also when it happens to lie inside somebody's repository.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here.parent, capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return None
        return done.stdout.strip()

    if git("ls-files", "--error-unmatch", here.name) is None:
        return None
    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"{git('rev-parse', '--short=12', 'HEAD')}{'-dirty' if changed else ''}"
