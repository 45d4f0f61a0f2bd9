"""Graph cache tests use the `pipe` fixture of tests/pipe."""

from tests.pipe.conftest import pipe  # noqa: F401
