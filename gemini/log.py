"""Telling: a line on standard error that is none of the program's, whatever the program has made of `print`.

Scripts put a `print` of their own into `builtins`, which stamps the time on standard output or is silent but on one
rank; what Gemini has to say must not go through it.
"""

from __future__ import annotations

import sys


def tell(text: str) -> None:
    """One line on standard error, where there is one."""
    if sys.stderr is not None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()
