"""TensorFlow imports: lets scripts of TensorFlow 1 run with TensorFlow 2.

    import tensorflow as tf                      from gemini.tensorflow.compat.graph_mode import tf1 as tf
    from tensorflow import flags, gfile          from gemini.tensorflow.compat.graph_mode import flags, gfile
    from tensorflow.contrib import rnn           from gemini.tensorflow.compat.contrib import rnn
    from tensorflow.contrib.rnn import GRUCell   from gemini.tensorflow.compat.contrib.rnn import GRUCell
    from tensorflow.keras import layers          from tf_keras import layers
    import tensorflow.compat.v1 as tf            …; from gemini.tensorflow.compat import tf1 as tf

`tf1` has the names of `tf.compat.v1` and those that even this module has lost; `graph_mode` also switches the process
from eager execution to graphs and sessions. A file is changed only where it uses a name that TensorFlow 2 (in the last
form: `tf.compat.v1`) does not have, outside of an `if` or `try` that asks for the version: everything else means today
what it means under `python`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gemini.instrument.names.tensorflow_v1_names import CONTRIB, KEYWORDS, LOST, is_lost_name, is_v1_name, v1_names
from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import last_word
from gemini.instrument.text.edits import Edit

_COMPAT = "gemini.tensorflow.compat"
_GRAPHS = f"{_COMPAT}.graph_mode"
_V1 = "tensorflow.compat.v1"
_VERSIONS = frozenset(["__version__", "VERSION", "hasattr", "executing_eagerly"])


class TensorflowImports(Pass):
    """The pass described above."""

    name = "tensorflow-imports"
    description = "resolve the names of TensorFlow 1 to tf.compat.v1 and the compatibility layer"
    triggers = ("tensorflow",)

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Replace the imports of TensorFlow where the file is one of TensorFlow 1."""
        is_v1, is_lost = _uses(unit)
        if not is_v1 and not is_lost:
            return
        for statement in unit.nodes(ast.Import):
            parts = [_imported(alias, is_v1, is_lost) for alias in statement.names]
            if any(parts):
                texts = [part or f"import {_spelled(alias)}" for part, alias in zip(parts, statement.names)]
                yield Edit.replace(statement, "; ".join(texts), "names of TensorFlow 1")
        for origin in unit.nodes(ast.ImportFrom):
            text = None if origin.level else _imported_from(origin, is_v1, is_lost)
            if text:
                yield Edit.replace(origin, text, "names of TensorFlow 1")


def _uses(unit: Unit) -> tuple[bool, bool]:
    """Return whether the file uses names that TensorFlow 2 does not have, and that `tf.compat.v1` does not have."""
    found = [name for node, name in _names(unit) if not _is_guarded(unit, node)]
    return any(map(is_v1_name, found)), any(map(is_lost_name, found))


def _names(unit: Unit) -> Iterator[tuple[ast.AST, str]]:
    """Yield the uses of TensorFlow's names that may be of TensorFlow 1, with their qualified names."""
    words = {name.rpartition(".")[2] for name in (*v1_names(), *LOST)}
    for attribute in unit.nodes(ast.Attribute):
        if attribute.attr in words and isinstance(attribute.ctx, ast.Load):
            name = unit.resolve(attribute)
            if name and name.startswith("tensorflow."):
                yield attribute, name
    for statement in unit.nodes(ast.Import):
        for alias in statement.names:
            if alias.name.startswith("tensorflow.contrib"):
                yield statement, alias.name
    for origin in unit.nodes(ast.ImportFrom):
        if not origin.level and (origin.module or "").partition(".")[0] == "tensorflow":
            yield from ((origin, f"{origin.module}.{alias.name}") for alias in origin.names)
    for call in unit.nodes(ast.Call):
        if any(keyword.arg in KEYWORDS for keyword in call.keywords):
            name = unit.resolve(call.func)
            if (
                name
                and name.startswith("tensorflow.")
                and not name.startswith(("tensorflow.compat.", "tensorflow.keras."))
            ):
                yield call, "tensorflow.Session"  # as good a witness as any


def _is_guarded(unit: Unit, node: ast.AST) -> bool:
    """Return whether a use is under a condition on TensorFlow's version, or where an attribute may be missing."""
    for around in unit.ancestors(node):
        if isinstance(around, (ast.If, ast.IfExp)) and _asks_for_version(around.test):
            return True
        if isinstance(around, ast.Try) and any(_catches(handler) for handler in around.handlers):
            return True
    return False


def _asks_for_version(test: ast.expr) -> bool:
    return any(last_word(each) in _VERSIONS for each in ast.walk(test) if isinstance(each, (ast.Name, ast.Attribute)))


def _catches(handler: ast.ExceptHandler) -> bool:
    """Return whether a handler is for names that are missing."""
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or last_word(kind) in ("AttributeError", "Exception", "ImportError", "ModuleNotFoundError")
        for kind in kinds
    )


def _imported(alias: ast.alias, is_v1: bool, is_lost: bool) -> str | None:
    """Return the statements in the place of `import …` of one module; None where it stays."""
    name, given = alias.name, alias.asname
    if name == _V1 and given and is_lost:
        return f"import {_spelled(alias)}; from {_COMPAT} import tf1 as {given}"
    if not is_v1 or name.partition(".")[0] != "tensorflow":
        return None
    if given is None:  # binds `tensorflow`, whatever module it names
        also = "" if name == "tensorflow" or name.startswith("tensorflow.contrib") else f"import {name}; "
        return f"{also}from {_GRAPHS} import tf1 as tensorflow"
    if name == "tensorflow":
        return f"from {_GRAPHS} import tf1 as {given}"
    module, _, last = name.rpartition(".")
    if module == "tensorflow" and is_v1_name(name):
        return f"from {_GRAPHS} import {last} as {given}"
    if module == "tensorflow.contrib" and last in CONTRIB:
        return f"from {_COMPAT}.contrib import {last} as {given}"
    if name == "tensorflow.keras" or name.startswith("tensorflow.keras."):
        return f"import {name.replace('tensorflow.keras', 'tf_keras', 1)} as {given}"
    return None


def _imported_from(origin: ast.ImportFrom, is_v1: bool, is_lost: bool) -> str | None:
    """Return the statement in the place of `from … import …`; None where it stays."""
    module = origin.module or ""
    names = ", ".join(map(_spelled, origin.names))
    if names == "*":
        return None
    if module == "tensorflow.compat" and is_lost and any(alias.name == "v1" for alias in origin.names):
        given = next(alias.asname or "v1" for alias in origin.names if alias.name == "v1")
        return f"from {module} import {names}; from {_COMPAT} import tf1 as {given}"
    if not is_v1:
        return None
    if module == "tensorflow":
        return f"from {_GRAPHS} import {names}"
    if module == "tensorflow.contrib":
        return f"from {_COMPAT}.contrib import {names}"
    part = module.removeprefix("tensorflow.contrib.")
    if part != module and part in CONTRIB:
        return f"from {_COMPAT}.contrib.{part} import {names}"
    if module == "tensorflow.keras" or module.startswith("tensorflow.keras."):
        return f"from {module.replace('tensorflow.keras', 'tf_keras', 1)} import {names}"
    return None


def _spelled(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name
