"""tf.contrib.cluster_resolver: how scripts name the TPUs of a cloud, which this layer does not reach."""

from __future__ import annotations

from typing import NoReturn


class TPUClusterResolver:
    """Refuses: scripts make one only where they train on TPUs of a cloud."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        _refuse(args, kwargs)


def _refuse(args: tuple[object, ...], kwargs: dict[str, object]) -> NoReturn:
    given = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])
    raise NotImplementedError(
        f"TPUClusterResolver({given}): TPUs of a cloud are not reached through TensorFlow 1's interface\n"
        "    → run the script without them, as with --use_tpu=false"
    )
