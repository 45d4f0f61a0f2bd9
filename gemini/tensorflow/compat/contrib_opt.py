"""tf.contrib.opt: optimizers with decoupled weight decay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from gemini.tensorflow.compat.lazy_names import tf


def extend_with_decoupled_weight_decay(base: type) -> Callable[..., Any]:
    """Return an optimizer class that subtracts `weight_decay` times a variable from it, and then steps as `base`."""

    class Decayed(base):  # type: ignore[misc]
        def __init__(self, weight_decay: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._weight_decay = weight_decay

        def apply_gradients(
            self,
            grads_and_vars: Any,
            global_step: Any = None,
            name: str | None = None,
            decay_var_list: Sequence[Any] | None = None,
        ) -> Any:
            pairs = list(grads_and_vars)
            chosen = None if decay_var_list is None else {id(one) for one in decay_var_list}
            decays = [
                tf.assign_sub(variable, tf.cast(self._weight_decay, variable.dtype.base_dtype) * variable)
                for gradient, variable in pairs
                if gradient is not None and (chosen is None or id(variable) in chosen)
            ]
            with tf.control_dependencies(decays):
                return super().apply_gradients(pairs, global_step=global_step, name=name)

    Decayed.__name__ = Decayed.__qualname__ = f"{base.__name__}WithDecoupledWeightDecay"
    return Decayed


@cache
def _decayed(name: str) -> Callable[..., Any]:
    return extend_with_decoupled_weight_decay(getattr(tf.train, name))


def __getattr__(name: str) -> Any:
    """Return one of the classes of this module, made on first use: their bases are TensorFlow's."""
    bases = {"AdamWOptimizer": "AdamOptimizer", "MomentumWOptimizer": "MomentumOptimizer"}
    if name in bases:
        return _decayed(bases[name])
    raise AttributeError(
        f"tf.contrib.opt.{name} is not in Gemini's compatibility layer for TensorFlow 1\n"
        f"    → it has {', '.join(bases)}; write this part with tf.compat.v1"
    )
