"""Types of deferred tensors: `type(x)` in a script, which instrumented source calls as `__gemini__.type_of`.

It is the builtin itself until calls of a model may be deferred.
"""

from __future__ import annotations

import sys
from typing import Any

type_of: Any = type


def see_through_deferred_tensors() -> None:
    """From now on, `__gemini__.type_of` returns `torch.Tensor` for a deferred tensor."""
    from gemini.runtime.deferred.deferred_tensor import public_type

    namespace: Any = sys.modules["gemini.launcher.script_api"]
    namespace.type_of = public_type
