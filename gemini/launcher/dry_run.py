"""Dry run: plans and reports; the program ends before its first backward pass."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import torch
from torch import nn

from gemini.launcher.model_discovery import Instead
from gemini.launcher.policy import Forced


class DryRun(Forced):
    """Plans every model that is called before the first backward pass."""

    def decide(self, model: nn.Module) -> Instead | bool | None:
        """Plan it when it is called, which is now."""
        torch.autograd.backward = _stop
        return lambda *args, **kwargs: self._report(model, args, kwargs)

    def _report(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        self.recognition.stop_watching()
        try:
            planner = self.planner()
            if planner is None:
                self.say(f"{type(model).__name__}: no plan of whole steps is asked for")
            else:
                self.show(model, planner(model, args, kwargs))
        except Exception as error:
            if self.config.strict:
                raise
            self.say(f"{type(model).__name__} would run a batch as one: {error}")
        finally:
            self.recognition.settle(model, managed=False)
            self.recognition.resume()
        return nn.Module.__call__(model, *args, **kwargs)


def _stop(*_: Any, **__: Any) -> NoReturn:
    """What a program's first `backward()` comes to."""
    sys.exit(0)
