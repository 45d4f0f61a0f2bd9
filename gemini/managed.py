"""The module that instrumented source imports as `__gemini__`: another name of `gemini.launcher.script_api`.

It is the same module object, not a wrapper: the launcher replaces functions in it while a program runs, and a lookup
costs a script's steps nothing extra.
"""

from __future__ import annotations

import sys

from gemini.launcher import script_api
from gemini.launcher.script_api import *  # noqa: F403 - the names, for type checkers

sys.modules[__name__] = script_api
