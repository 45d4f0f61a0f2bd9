"""TensorFlow spelling: which imports are changed, in which files, and that the table of names is TensorFlow's own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gemini.instrument.names.tensorflow_v1_names import CONTRIB, v1_names
from gemini.instrument.passes.tensorflow_imports import TensorflowImports
from tests.instrument.assert_pass import assert_pass

GRAPHS = "from gemini.tensorflow.compat.graph_mode import"
SESSION = "tf.Session()"

CHANGED = [
    (f"import tensorflow as tf\n{SESSION}", f"{GRAPHS} tf1 as tf\n{SESSION}"),
    (f"import os, tensorflow as tf  # both\n{SESSION}", f"import os; {GRAPHS} tf1 as tf  # both\n{SESSION}"),
    ("import tensorflow\ntensorflow.flags.FLAGS", f"{GRAPHS} tf1 as tensorflow\ntensorflow.flags.FLAGS"),
    ("def f():\n    import tensorflow as tf; return tf.placeholder",
     f"def f():\n    {GRAPHS} tf1 as tf; return tf.placeholder"),
    ("from tensorflow import flags as f, nn", f"{GRAPHS} flags as f, nn"),
    ("from tensorflow.contrib import rnn, layers as L",
     "from gemini.tensorflow.compat.contrib import rnn, layers as L"),
    ("from tensorflow.contrib.rnn import (\n    GRUCell,\n)\n",
     "from gemini.tensorflow.compat.contrib.rnn import GRUCell\n\n\n"),
    ("import tensorflow.contrib.layers as L", "from gemini.tensorflow.compat.contrib import layers as L"),
    (f"import tensorflow as tf\nfrom tensorflow.keras.layers import Dense\n{SESSION}",
     f"{GRAPHS} tf1 as tf\nfrom tf_keras.layers import Dense\n{SESSION}"),
    (f"import tensorflow as tf\nimport tensorflow.python.ops\n{SESSION}",
     f"{GRAPHS} tf1 as tf\nimport tensorflow.python.ops; {GRAPHS} tf1 as tensorflow\n{SESSION}"),
    ("import tensorflow as tf\ntf.reduce_sum(x, keep_dims=True)",
     f"{GRAPHS} tf1 as tf\ntf.reduce_sum(x, keep_dims=True)"),
    ("import tensorflow as tf\nf = tf.train\nf.AdamOptimizer(0.1)",
     f"{GRAPHS} tf1 as tf\nf = tf.train\nf.AdamOptimizer(0.1)"),
    ("import tensorflow as tf\nif tf.__version__ < '1.11': raise SystemExit\ntf.app.run()",
     f"{GRAPHS} tf1 as tf\nif tf.__version__ < '1.11': raise SystemExit\ntf.app.run()"),
    ("import tensorflow.compat.v1 as tf\ntf.layers.dense(x, 2)",
     "import tensorflow.compat.v1 as tf; from gemini.tensorflow.compat import tf1 as tf\ntf.layers.dense(x, 2)"),
    ("from tensorflow.compat import v1 as tf\ntf.contrib.layers.layer_norm(x)",
     "from tensorflow.compat import v1 as tf; from gemini.tensorflow.compat import tf1 as tf\n"
     "tf.contrib.layers.layer_norm(x)"),
]  # fmt: skip
UNCHANGED = [
    "import tensorflow as tf\ntf.reshape(tf.Variable(1), [1])",
    "import tensorflow as tf\ntf.compat.v1.Session()",
    "import tensorflow.compat.v1 as tf\ntf.Session()",
    "import tensorflow as tf\ntf.keras.layers.Dense(2)\ntf.losses.mean_squared_error(a, b)",
    "import tensorflow as tf\ndef f(tf): tf.Session()",
    "import tensorflow as tf\nimport torch as tf\ntf.Session()",
    "import tensorflow as tf\nif tf.__version__ < '2': tf.set_random_seed(1)\nelse: tf.random.set_seed(1)",
    "import tensorflow as tf\nhasattr(tf, 'Session') and print()\ns = tf.Session() if hasattr(tf, 'Session') else None",
    "import tensorflow as tf\ntry:\n    tf.enable_eager_execution()\nexcept AttributeError:\n    pass",
    "try:\n    import tensorflow.compat.v1 as tf\nexcept ImportError:\n    import tensorflow as tf\ntf.Session()",
    "import tensorflow as tf\ntf = tf.compat.v1\ntf.Session()",
    "text = 'import tensorflow as tf; tf.Session()'",
]


@pytest.mark.parametrize(("before", "after"), CHANGED)
def test_imports_of_files_with_names_of_tensorflow_1(before: str, after: str) -> None:
    assert_pass(TensorflowImports(), before, after)


@pytest.mark.parametrize("text", UNCHANGED)
def test_other_files_stay(text: str) -> None:
    assert_pass(TensorflowImports(), text, text)


@pytest.mark.parametrize("text", [after for _, after in CHANGED])
def test_a_changed_file_stays(text: str) -> None:
    assert_pass(TensorflowImports(), text, text)


def test_unknown_parts_of_contrib_stay_for_python_to_refuse() -> None:
    text = "from tensorflow.contrib.slim import nets"
    assert_pass(TensorflowImports(), text, text)


NAMES = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
from gemini.instrument.names.tensorflow_v1_names import LOST, v1_names
for name in v1_names():
    path = name.split(".")[1:]
    if ".".join(path) in LOST:
        continue
    old, new = tf.compat.v1, tf
    for part in path:
        old, new = getattr(old, part), getattr(new, part, None)
    assert new is None, f"{name} is a name of TensorFlow 2"
public = {name for name in dir(tf.compat.v1) if not name.startswith("_") and not name.endswith("VERSION")}
missing = public - set(dir(tf)) - {name.split(".")[1] for name in v1_names()}
assert all("VERSION" in name for name in missing), missing
"""


def test_the_table_is_that_of_tensorflow() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
    assert len(v1_names()) > 500


def test_the_parts_of_contrib_are_those_of_the_layer() -> None:
    from gemini.tensorflow.compat.contrib import PARTS

    assert frozenset(PARTS) == CONTRIB
