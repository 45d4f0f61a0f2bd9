"""The cost of capture and profiling in eager training steps, and how well node times add up and repeat.

    python benchmarks/bench_profile.py [--device cuda] [--models bert gpt2 resnet unet] [--quick]

Everything is measured in this run on this machine; every ratio is printed with its limit, and the exit code is 1 where
one is missed. Every model is profiled twice. `--threads 1 --clock cpu` gives steady figures on a busy machine;
`--quick` takes shallow models and small images.
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
    labels = torch.randint(0, 1000, (options.photos,))
    return ResNet(), (images(options.photos, options.pixels), labels), {}


def unet(options: argparse.Namespace) -> Made:
    labels = torch.randint(0, 2, (options.images, options.pixels, options.pixels))
    return UNet(), (images(options.images, options.pixels), labels), {}


def images(count: int, pixels: int) -> torch.Tensor:
    return torch.randn(count, 3, pixels, pixels)


MODELS: dict[str, Callable[[argparse.Namespace], Made]] = {"bert": bert, "gpt2": gpt2, "resnet": resnet, "unet": unet}


def main() -> int:
    options = arguments()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    failed = 0
    for name in options.models:
        failed += Bench(name, options).run()
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, help="4; on a GPU 16 texts, 256 images to classify, 64 to segment")
    parser.add_argument("--length", type=int, help="tokens of a text: 64, on a GPU 512")
    parser.add_argument("--pixels", type=int, help="width of an image: 128, on a GPU 224")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--quick", action="store_true", help="shallow models, small images")
    options = parser.parse_args()
    on_cpu = options.device == "cpu"  # what a GPU trains on in earnest would take a CPU hours
    options.images = options.batch or (4 if on_cpu else 64)
    options.photos = options.batch or (4 if on_cpu else 256)
    options.batch = options.batch or (4 if on_cpu else 16)
    options.length = options.length or (64 if on_cpu else 512)
    options.pixels = options.pixels or (128 if on_cpu else 224)
    if options.quick:
        options.layers, options.pixels = min(options.layers, 4), min(options.pixels, 64)
    return options


class Bench:
    """One model on one device."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        from gemini.profiling.cpu_device import CpuDevice
        from gemini.profiling.measured_device import find_device

        self.name = name
        self.device = CpuDevice(clock=options.clock) if options.device == "cpu" else find_device(options.device)
        with self.device.torch_device:  # a GPU draws random weights in no time
            model, args, kwargs = MODELS[name](options)
        self.model = model.to(self.device.torch_device).train()
        self.args = tuple(value.to(self.device.torch_device) for value in args)
        self.kwargs = {key: value.to(self.device.torch_device) for key, value in kwargs.items()}
        self.read = time.process_time if options.clock == "cpu" else time.perf_counter

    def eager(self) -> float:
        """Seconds of one training step without the optimizer."""
        self.model.zero_grad(set_to_none=True)
        begin = self.now()
        output = self.model(*self.args, **self.kwargs)
        (output if isinstance(output, torch.Tensor) else output["loss"]).backward()
        return self.now() - begin

    def now(self) -> float:
        """The clock, once the device is idle."""
        if self.device.kind == "cuda":
            torch.cuda.synchronize()
        return self.read()

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What a call returns, and its seconds."""
        begin = self.now()
        result = call()
        return result, self.now() - begin

    def run(self) -> int:
        """Print all figures; the number of limits missed."""
        from gemini.capture import capture
        from gemini.profiling import profile

        eager = [self.eager() for _ in range(5 if self.device.kind == "cpu" else 12)][2:]
        step = statistics.median(eager)
        self.model.zero_grad(set_to_none=True)
        graph, captured = self.timed(lambda: capture(self.model, self.args, self.kwargs))
        found = [
            self.timed(lambda: profile(graph, self.args, self.kwargs, device=self.device, cache=False))
            for _ in range(2)
        ]
        (first, cost), (second, again) = found
        print(f"{self.name}: {len(first)} nodes in {len({n.node_class for n in first})} classes on {first.device}")
        print(f"  one eager step                 {step * 1e3:9.1f} ms (least {min(eager) * 1e3:.1f})")
        chosen, best = judged(first, second)
        missed = [
            limit("capture ÷ (3 steps + 2 s)", captured / (3 * step + 2), 1.0),
            limit("first profile ÷ eager step", cost / step, 10.0),
            limit("second profile ÷ eager step", again / step, 10.0),
            *(limit(f"|sum ÷ step − 1|, {which}", abs(p.check.error), 0.1)
              for which, p in (("first", first), ("second", second))),
            limit("second against first, median", drift(first, second), 0.1),
            limit("4 stages: cut of the first ÷ best, on the second", chosen / best, 1.03),
        ]  # fmt: skip
        print(f"  4 stages, bottleneck ÷ ideal on the second: {chosen:.3f} cut by the first, {best:.3f} by itself")
        for each in (first, second):
            host, device = sum(n.host_ms for n in each), sum(n.device_ms for n in each)
            parts = f"; host {host:.1f} ms, device {device:.1f} ms" if host else ""
            print(f"  {each.check}{parts}; limited by the {each.limit}; noise {each.noise:.1%}")
        for node in [node for node in first if node.source != "measured"][:3]:
            print(f"    {node.name}: {node.reason}")
        return sum(missed)


def limit(label: str, value: float, most: float) -> bool:
    """Print a figure; whether it misses its limit."""
    print(f"  {label:<50}{value:8.3f}   limit {most:<5}{'' if value <= most else '  MISSED'}")
    return value > most


def drift(first: Any, second: Any) -> float:
    """How far the times of nodes differ, median over the nodes."""
    return statistics.median(abs(a.ms - b.ms) / a.ms for a, b in zip(first, second, strict=True) if a.ms)


def judged(first: Any, second: Any, stages: int = 4) -> tuple[float, float]:
    """Bottleneck ÷ ideal, by the second profile, of contiguous stages chosen by the first and by itself."""
    times = [node.ms for node in second]
    ideal = sum(times) / stages
    cuts = [contiguous([node.ms for node in one], stages) for one in (first, second)]
    return tuple(max(sum(times[a:b]) for a, b in zip([0, *c], [*c, len(times)])) / ideal for c in cuts)  # type: ignore[return-value]


def contiguous(times: list[float], stages: int) -> list[int]:
    """Where to cut so that the dearest stage is cheapest: dynamic programming over (stages, nodes)."""
    ends = [0.0]
    for ms in times:
        ends.append(ends[-1] + ms)
    best, came = list(ends), []
    for _ in range(stages - 1):
        row, source = [0.0] * len(ends), [0] * len(ends)
        for end in range(len(ends)):
            row[end], source[end] = min((max(best[cut], ends[end] - ends[cut]), cut) for cut in range(end + 1))
        best, came = row, [*came, source]
    cuts, at = [], len(times)
    for source in reversed(came):
        at = source[at]
        cuts.append(at)
    return cuts[::-1]


if __name__ == "__main__":
    sys.exit(main())
