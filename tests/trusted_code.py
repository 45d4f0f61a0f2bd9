"""Trust code of the tests like that of a library; workers import this file where a test asks for trust."""

from __future__ import annotations

import sys

from gemini.purity import allowances, value_kinds


class TrustedLibraries(frozenset[str]):
    """The trusted libraries, and all test modules."""

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name == "tests" or str(name).startswith("test_")


if "pytest" not in sys.modules:  # a worker, which ends with the tests
    allowances.LIBRARIES = value_kinds.LIBRARIES = TrustedLibraries(allowances.LIBRARIES)
