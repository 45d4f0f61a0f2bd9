"""TensorFlow: two stages on two one-thread processes against one one-thread process, and the time to build twins.

    python benchmarks/bench_tensorflow.py            on a quiet machine with two cores

Limits: 1.35 × faster at 4 micro-batches and 1.5 × at 8, 1.12 × the CPU time; twins of 4 layers × 4 micro-batches in
5 s, of 24 × 8 in 60 s. The ratio to one process with two threads is printed without a limit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, LENGTH, WORDS, BATCH = 4, 512, 8, 32, 2000, 64
LIMITS = {4: 1.35, 8: 1.5}
CPU_LIMIT = 1.12
BUILDS = {(4, 4): 5.0, (24, 8): 60.0}  # layers, micro-batches → seconds
_MEASURE, _BUILD = "measure", "build"


def main() -> int:
    """Print every ratio with its limit; 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="timed steps per run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of every kind; the best counts")
    parser.add_argument("--only", choices=["speed", "builds"], help="half of the measurements")
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        kind, one, other = arguments.run
        print(json.dumps((_measure if kind == _MEASURE else _build)(int(one), int(other), arguments.steps)))
        return 0
    missed = 0
    if arguments.only != "builds":
        missed += _compare_speed(arguments.steps, arguments.rounds)
    if arguments.only != "speed":
        missed += _compare_builds()
    return 1 if missed else 0


def _compare_speed(steps: int, rounds: int) -> int:
    single = _best(rounds, steps, 1, 0)
    double = _best(rounds, steps, 2, 0)
    missed = 0
    for count, limit in LIMITS.items():
        found = _best(rounds, steps, 1, count)
        faster, cpu = single["wall"] / found["wall"], found["cpu"] / single["cpu"]
        missed += (faster < limit) + (cpu > CPU_LIMIT)
        print(
            f"{count} micro-batches: {found['wall']:.3f} s per step, one thread {single['wall']:.3f} s: "
            f"{faster:.2f} × faster (limit {limit:.2f}), CPU time {cpu:.2f} × (limit {CPU_LIMIT:.2f}), "
            f"{double['wall'] / found['wall']:.2f} × one process with two threads",
            flush=True,
        )
    return missed


def _compare_builds() -> int:
    missed = 0
    for (layers, count), limit in BUILDS.items():
        seconds = _run(_BUILD, layers, count, 1)["seconds"]
        missed += seconds > limit
        print(f"twin of {layers} layers × {count} micro-batches: {seconds:.1f} s (limit {limit:.0f} s)", flush=True)
    return missed


def _best(rounds: int, steps: int, threads: int, count: int) -> dict[str, Any]:
    return min((_run(_MEASURE, threads, count, steps) for _ in range(rounds)), key=lambda found: found["wall"])


def _run(kind: str, one: int, other: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--steps", str(steps), "--run", kind, str(one), str(other)]
    root = Path(__file__).resolve().parents[1]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measure(threads: int, count: int, steps: int) -> dict[str, float]:
    """Train in this process, or on two servers by `count` micro-batches; return the seconds per step."""
    import tensorflow.compat.v1 as tf

    from gemini.config.gemini_config import GeminiConfig
    from gemini.tensorflow import entry
    from tests.tensorflow.models.transformers import masked_encoder

    tf.disable_eager_execution()
    if count:
        entry.install(GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=count, quiet=True))
    tf.enable_resource_variables()
    case = masked_encoder(LAYERS, WIDTH, HEADS, LENGTH, WORDS)
    step = tf.train.AdamOptimizer(1e-3).minimize(case.loss)
    settings = tf.ConfigProto(intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads)
    with tf.Session(config=settings) as session:
        session.run(tf.global_variables_initializer())
        batches = [case.batch(BATCH, seed) for seed in range(2)]
        for batch in batches:
            session.run([case.loss, step], batch)
        cpu, wall = _cpu_seconds(), time.perf_counter()
        for at in range(steps):
            session.run([case.loss, step], batches[at % 2])
        result = {"wall": (time.perf_counter() - wall) / steps, "cpu": (_cpu_seconds() - cpu) / steps}
    if count and any(report.reason for report in entry.reports()):
        raise SystemExit(entry.reports()[0].line)
    return result


def _build(layers: int, count: int, steps: int) -> dict[str, float]:
    """Build the twin of two stages; return the seconds."""
    del steps
    from tests.tensorflow.models.graph_training import in_process, train
    from tests.tensorflow.models.transformers import masked_encoder

    run = train(lambda: masked_encoder(layers), in_process(2, count), sizes=(8,))
    (report,) = run.reports
    if report.reason:
        raise SystemExit(report.line)
    return {"seconds": report.build_seconds}


def _cpu_seconds() -> float:
    """Return the CPU time of this process and its children, which are the servers."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if str(os.getpid()) in (stat.parent.name, fields[1]):
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
