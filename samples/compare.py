"""Run a sample under `gemini_python`, then under `python`; compare the last losses and the time per step.

    python samples/compare.py samples/mnist/train.py --epochs 3
    MODE=hybrid python samples/compare.py samples/gpt/train.py --steps 20

MODE is pipeline (two workers), sharding (two) or hybrid (four).

The printed output is that of the parallel run. The run on one device uses copies in a separate folder.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_STAGES = ("--pipeline-degree", "2", "--accum-degree", "4")
MODES = {
    "pipeline": ("--mode", "pipeline", *_STAGES),
    "sharding": ("--mode", "sharding", "--sharding-size", "2"),
    "hybrid": ("--mode", "hybrid", "--sharding-size", "2", *_STAGES),
}
LOSS = re.compile(r"loss[^\d\n]{1,3}(\d+\.\d+)")
STEP = re.compile(r"(\d+(?:\.\d+)?) ms per step")  # a sample that measures its steps prints this


def last(pattern, text):
    found = pattern.findall(text)
    return float(found[-1]) if found else None


def run(command, folder, show):
    """Run a command; its standard output is kept, and shown as it comes."""
    lines = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            lines.append(line)
            if show:
                print(line, end="", flush=True)
    if process.returncode:
        sys.exit(process.returncode)
    return "".join(lines)


def copied(arguments, folder):
    """The arguments, with files that exist replaced by copies: the first run may write to them."""
    result = []
    for argument in arguments:
        path = Path(argument)
        if path.is_file():
            argument = shutil.copy(path, folder / path.name)
        elif path.is_dir():
            argument = path.resolve()
        result.append(str(argument))
    return result


def main():
    script, arguments = Path(sys.argv[1]).resolve(), sys.argv[2:]
    mode = os.environ.get("MODE") or "pipeline"
    if mode not in MODES:
        sys.exit(f"MODE={mode}: give one of {', '.join(MODES)}")
    launcher = Path(sys.executable).with_name("gemini_python")
    with tempfile.TemporaryDirectory() as name:
        alone = copied(arguments, Path(name))
        parallel = run([launcher, *MODES[mode], script, *arguments], None, show=True)
        print("── the same on one device …", file=sys.stderr, flush=True)
        single = run([sys.executable, script, *alone], name, show=False)
    two, one = last(LOSS, parallel), last(LOSS, single)
    if two is None or one is None:
        sys.exit("no loss was printed")
    print(f"last loss: {two} in workers, {one} on one device, difference {abs(two - one):.1g}")
    two, one = last(STEP, parallel), last(STEP, single)
    if two and one:
        cores = len(os.sched_getaffinity(0))
        print(f"time per step: {two} ms in workers, {one} ms under python on {cores} cores: {one / two:.2f} ×")


if __name__ == "__main__":
    main()
