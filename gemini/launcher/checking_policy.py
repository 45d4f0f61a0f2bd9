"""The policy of `gemini check`: it takes the models of a program at their first call.

It needs no workers. It ends when every folder of stages was checked, or before the second step of an optimizer.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.policy import ForcedPolicy
from gemini.parallel_program.program_check import CheckLine, check_stages, write_lines
from gemini.parallel_program.program_files import read_program


class CheckingPolicy(ForcedPolicy):
    """Checks the stages of every model at its first call; all calls run in this process."""

    def __init__(self, config: GeminiConfig, target: Path) -> None:
        super().__init__(config)
        self.target = target
        self._left = read_program(Path(config.program or "").resolve())
        self._lines: list[CheckLine] = []
        self._steps: Counter[int] = Counter()
        register_optimizer_step_pre_hook(self._end_after_step)

    def decide(self, model: nn.Module) -> bool:
        """Check the stages of this model."""
        mine = [one for one in self._left if one.facts.model == type(model).__name__]
        for one in mine:
            self._lines += check_stages(one, model)
            self._left.remove(one)
        write_lines(self.target, self._lines)
        if not self._left:
            sys.exit(0)
        return False

    def _end_after_step(self, optimizer: Any, *_: Any) -> None:
        self._steps[id(optimizer)] += 1
        if self._steps[id(optimizer)] > 1:
            sys.exit(0)
