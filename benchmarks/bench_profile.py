"""What capturing and profiling cost, in eager training steps, and how well node times add up to a step.

    python benchmarks/bench_profile.py [--device cuda] [--models bert gpt2 resnet unet] [--batch 4] [--length 64]

Everything is measured in this run on this machine. Limits: capture of BERT-large at most 3 steps + 2 s; profiling it
at most 10 steps; the sum of node times within 10 % of the whole step for every model; a second profile within 10 % of
the first (median over nodes). `--threads 1 --clock cpu` gives steady figures on a busy machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Made = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def bert(options: argparse.Namespace) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=options.layers, num_attention_heads=16, intermediate_size=4096
    )
    return BertForMaskedLM(config), (), tokens(options, config.vocab_size)


def gpt2(options: argparse.Namespace) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=1024, n_layer=options.layers, n_head=16, use_cache=False)
    return GPT2LMHeadModel(config), (), tokens(options, config.vocab_size)


def tokens(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    ids = torch.randint(0, vocabulary, (options.batch, options.length))
    return {"input_ids": ids, "labels": ids.clone()}


class Residual(nn.Module):
    """The bottleneck of ResNet-50."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = 4 * inner
        self.first = nn.Sequential(nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True))
        self.second = nn.Sequential(
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(True)
        )
        self.third = nn.Sequential(nn.Conv2d(inner, outer, 1, bias=False), nn.BatchNorm2d(outer))
        same = stride == 1 and channels == outer
        self.skip = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(channels, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Features to features."""
        return functional.relu(self.third(self.second(self.first(x))) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-50 with its loss."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True)]
        layers.append(nn.MaxPool2d(3, 2, 1))
        channels = 64
        for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for index in range(count):
                layers.append(Residual(channels, inner, stride if index == 0 else 1))
                channels = 4 * inner
        self.body, self.head = nn.Sequential(*layers), nn.Linear(channels, 1000)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Images and labels to the loss."""
        return functional.cross_entropy(self.head(self.body(x).mean((2, 3))), labels)


class UNet(nn.Module):
    """Four levels down, four up, with long skips."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width << level for level in range(4)]
        self.down = nn.ModuleList(self.pair(a, b) for a, b in zip([3, *sizes[:-1]], sizes))
        self.middle = self.pair(sizes[-1], 2 * sizes[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, 2) for s in reversed(sizes))
        self.join = nn.ModuleList(self.pair(2 * s, s) for s in reversed(sizes))
        self.head = nn.Conv2d(width, 2, 1)

    @staticmethod
    def pair(before: int, after: int) -> nn.Sequential:
        """Two convolutions."""
        layers: list[nn.Module] = []
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Images and labels to the loss."""
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for up, join, skip in zip(self.up, self.join, reversed(skips)):
            x = join(torch.cat([up(x), skip], 1))
        return functional.cross_entropy(self.head(x), labels)


def resnet(options: argparse.Namespace) -> Made:
    return ResNet(), (images(options, options.pixels), torch.randint(0, 1000, (options.batch,))), {}


def unet(options: argparse.Namespace) -> Made:
    labels = torch.randint(0, 2, (options.batch, options.pixels, options.pixels))
    return UNet(), (images(options, options.pixels), labels), {}


def images(options: argparse.Namespace, pixels: int) -> torch.Tensor:
    return torch.randn(options.batch, 3, pixels, pixels)


MODELS: dict[str, Callable[[argparse.Namespace], Made]] = {"bert": bert, "gpt2": gpt2, "resnet": resnet, "unet": unet}


def main() -> int:
    options = arguments()
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    failed = 0
    for name in options.models:
        failed += measure(name, options)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--pixels", type=int, default=128)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    return parser.parse_args()


def measure(name: str, options: argparse.Namespace) -> int:
    """One model: a line of figures; the number of limits it breaks."""
    from gemini.capture import capture
    from gemini.profiling import profile
    from gemini.profiling.cpu import CpuDevice
    from gemini.profiling.device import find_device

    device = CpuDevice(clock=options.clock) if options.device == "cpu" else find_device(options.device)
    read = time.process_time if options.clock == "cpu" else time.perf_counter
    model, args, kwargs = MODELS[name](options)
    model = model.to(device.torch_device).train()
    args = tuple(value.to(device.torch_device) for value in args)
    kwargs = {key: value.to(device.torch_device) for key, value in kwargs.items()}
    step = statistics.median([eager(model, args, kwargs, read, device) for _ in range(4)][1:])

    begin = read()
    graph = capture(model, args, kwargs)
    captured = read() - begin
    begin = read()
    first = profile(graph, args, kwargs, device=device, cache=False)
    profiled = read() - begin
    again = profile(graph, args, kwargs, device=device, cache=False)
    drift = statistics.median(
        abs(a.ms - b.ms) / max(a.ms, 1e-9) for a, b in zip(first.nodes, again.nodes, strict=True) if a.ms
    )
    analytic = [node.name for node in first if node.source != "measured"]
    check = first.check
    assert check is not None
    print(f"{name}: {len(first)} nodes in {len({node.node_class for node in first})} classes on {first.device}")
    print(f"  one eager step       {step * 1e3:9.1f} ms")
    limits = [
        ("capture ÷ (3 steps + 2 s)", captured / (3 * step + 2), 1.0),
        ("profile ÷ eager step", profiled / step, 10.0),
        ("|sum ÷ whole step − 1|", abs(check.error), 0.1),
        ("second profile, median", drift, 0.1),
    ]
    for label, value, limit in limits:
        print(f"  {label:<28}{value:8.3f}   limit {limit:<5}{'' if value <= limit else '  MISSED'}")
    print(f"  sum ÷ eager step {check.sum_ms / step / 1e3:.3f}")
    print(f"  {check}; limited by the {first.limit}; noise {first.noise:.1%}; not measured: {len(analytic)}")
    for node in [node for node in first if node.source != "measured"][:3]:
        print(f"    {node.name}: {node.reason}")
    return sum(value > limit for _, value, limit in limits)


def eager(model: nn.Module, args: Any, kwargs: Any, read: Callable[[], float], device: Any) -> float:
    """Seconds of one training step without the optimizer."""
    model.zero_grad(set_to_none=True)
    if device.kind == "cuda":
        torch.cuda.synchronize()
    begin = read()
    output = model(*args, **kwargs)
    (output if isinstance(output, torch.Tensor) else output["loss"]).backward()
    if device.kind == "cuda":
        torch.cuda.synchronize()
    return read() - begin


if __name__ == "__main__":
    sys.exit(main())
