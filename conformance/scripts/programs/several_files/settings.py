"""What the project can be told."""

import argparse
from dataclasses import dataclass


@dataclass
class Settings:
    epochs: int = 2
    lr: float = 0.003
    seed: int = 7
    width: int = 32
    output: str = "checkpoint.pt"

    @classmethod
    def from_arguments(cls, argv):
        parser = argparse.ArgumentParser()
        for name, kind in cls.__annotations__.items():
            parser.add_argument(f"--{name}", type=kind, default=getattr(cls, name))
        return cls(**vars(parser.parse_args(argv)))
