"""One helper for all tests of passes: before, after, and what must hold of every change."""

import ast
from collections.abc import Iterable

from gemini.instrument.pass_manager.instrumented_file import Instrumented
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.base import Pass
from gemini.instrument.text.source_file import SourceFile


def assert_pass(passes: Pass | Iterable[Pass], before: str, after: str, path: str = "user.py") -> Instrumented:
    """Assert that `passes` turn `before` into exactly `after`, which compiles and keeps every line."""
    chosen = [passes] if isinstance(passes, Pass) else list(passes)
    source = SourceFile.from_text(before, path, "user")
    done = PassManager(chosen).run(source)
    assert not done.failures, done.failures[0].message
    assert done.text == after
    assert done.changed == (before != after)
    assert done.text.count("\n") == before.count("\n")
    assert done.code().co_filename == path
    if not done.changed:
        assert done.data is source.data
    for node in ast.walk(done.tree):
        if hasattr(node, "end_lineno"):
            assert 1 <= node.lineno <= node.end_lineno <= max(1, len(before.splitlines()))
    return done
