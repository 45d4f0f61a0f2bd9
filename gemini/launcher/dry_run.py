"""Dry run: plans models and reports the plans; the program ends before its first backward pass."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import nn

from gemini.launcher.model_discovery import ReplacementCall
from gemini.launcher.policy import ForcedPolicy


class DryRunPolicy(ForcedPolicy):
    """Plans every model that is called before the first backward pass."""

    def decide(self, model: nn.Module) -> ReplacementCall | bool | None:
        """Plan the model at this call."""
        torch.autograd.backward = _stop
        return lambda *args, **kwargs: self._report(model, args, kwargs)

    def _report(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self.discovery.stop_watching()
        try:
            planner = self.planner()
            if planner is None:
                self.print_line(f"{type(model).__name__}: whole-step planning is off")
            else:
                self.show(model, planner(model, args, kwargs))
        except Exception as error:
            if self.config.strict:
                raise
            self.print_line(f"{type(model).__name__} would run each batch as a single micro-batch: {error}")
        finally:
            self.discovery.settle(model, managed=False)
            self.discovery.resume()
        return nn.Module.__call__(model, *args, **kwargs)


def _stop(*_: Any, **__: Any) -> NoReturn:
    """End the program in place of its first `backward()`."""
    sys.exit(0)
