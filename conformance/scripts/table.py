"""`python -m conformance.scripts.table`: judges every program and writes build/conformance/scripts.md.

python -m conformance.scripts.table                        all of them, one at a time
python -m conformance.scripts.table --only vae unet        these anew; the others as they were
python -m conformance.scripts.table --new                  those without a verdict: takes a sweep up again
python -m conformance.scripts.table --draw                 the table from the verdicts that are there
python -m conformance.scripts.table --quick --references D all, with runs under python in children of this one, kept
in D
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from conformance.scripts import results
from conformance.scripts.comparison import FACTOR
from conformance.scripts.registry import BY_NAME, PROGRAMS, Program
from conformance.scripts.strictness import BY_THE_LETTER, LIMITS, STRICT
from conformance.scripts.verdict import Verdict, judge
from gemini.runtime.call_outcome import CallPath

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "build" / "conformance" / "scripts.md"
VERDICTS = ROOT / ".gemini" / "scripts.jsonl"

_HEAD = """\
# Scripts under `gemini_python`

Ordinary training scripts (`conformance/scripts/programs`), each run under `python` with one thread and under
`gemini_python
--mode pipeline --pipeline-degree 2 --accum-degree 4`, one thread a worker, on a CPU.

*Same* means: the text printed is equal but for numbers with a decimal point, so are exit code and traceback, the
checkpoint holds the same entries, nothing is left behind, and no number printed or saved is beyond these limits:

| limit | |
|---|---|
| equal | the same digits; the same bits |
| threads | off by at most {factor} × what `python` with two threads is off from one thread, up to the same place |
| last bits | off by at most {factor} × what `python` is off when the last bit of every weight is another before the \
first step, and that of what every call of a linear layer, convolution or embedding adds to a gradient (the most of up \
to five such runs). It stands in where ops are too small for a second thread to change anything: {factor} × nothing \
would ask for one order of sums, which micro-batches do not keep |
| last digit | off by one in the last digit printed |
| beyond | off by more than that |

*Printed* and *saved* tell the strictest one that all numbers printed, and all tensors of the checkpoint, meet. Of
chaotic scripts (reinforcement learning, adversarial pairs) the first ten lines with numbers are held to it. Tensors are
compared by their largest difference, relative to their largest entry. Written by `python -m conformance.scripts.table`.

"""


def render(verdicts: Mapping[str, Verdict]) -> str:
    """The table, and what it comes to."""
    lines = [_HEAD.format(factor=FACTOR) + _sums(verdicts), "", _strict(verdicts), ""]
    lines += ["| script | kind | same | printed | saved | path | steps | why not faster |", "|---|" + "---|" * 7]
    lines += [_row(program, verdicts.get(program.name)) for program in PROGRAMS]
    return "\n".join(lines) + "\n"


def _sums(verdicts: Mapping[str, Verdict]) -> str:
    known = [verdicts[program.name] for program in PROGRAMS if program.name in verdicts]
    fine = [verdict for verdict in known if not verdict.faults]
    split = [verdicts[p.name] for p in PROGRAMS if p.name in verdicts and not p.why_whole]
    fast = [verdict for verdict in split if _is_fast(verdict) and not verdict.faults]
    paths = ", ".join(f"{sum(v.path == path for v in known)} {path}" for path in CallPath)
    share = f" ({100 * len(fast) / len(split):.0f} %)" if split else ""
    return (
        f"{len(fine)} of {len(known)} are the same. By path: {paths}. Of {len(split)} whose steps are sums over "
        f"samples, {len(fast)}{share} ran by an overlapped schedule (in a third or more of all calls, evaluation and "
        "generation counted)."
    )


def _is_fast(verdict: Verdict) -> bool:
    """Whether the overlapped path is the usual one; first calls, evaluation and generation may be the most."""
    return 3 * verdict.steps.get(CallPath.OVERLAPPED, 0) >= sum(verdict.steps.values()) > 0


def _strict(verdicts: Mapping[str, Verdict]) -> str:
    known = [verdicts[program.name] for program in PROGRAMS if program.name in verdicts]
    printed = ", ".join(f"{sum(v.printed == limit for v in known)} {limit}" for limit in LIMITS)
    saved = ", ".join(f"{sum(v.saved == limit for v in known)} {limit}" for limit in LIMITS)
    letter = sum(not v.faults and v.printed in BY_THE_LETTER for v in known)
    stood = sum(not v.faults and v.printed in STRICT and v.saved in (*STRICT, "") for v in known)
    return (
        f"Printed: {printed}. Saved: {saved}. By threads alone, what is printed is within the limit in {letter} of "
        f"{len(known)}; with last bits where threads change nothing, all that is printed and saved in {stood}."
    )


def _row(program: Program, verdict: Verdict | None) -> str:
    if verdict is None:
        absent = f"needs {', '.join(program.missing)}" if program.missing else "not judged"
        return f"| {program.name} | {program.kind} | | | | | | {absent} |"
    same = "yes" if not verdict.faults else f"**no**: {verdict.faults[0]}"
    steps = ", ".join(f"{count} {path}" for path, count in verdict.steps.items())
    why = "" if verdict.path == CallPath.OVERLAPPED and not verdict.reason else verdict.reason
    if program.why_whole:
        why = f"{program.why_whole}: {why}" if why else program.why_whole
    cells = (program.name, program.kind, same, verdict.printed, verdict.saved, verdict.path, steps, why)
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|")[:300] for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), default=[])
    parser.add_argument("--draw", action="store_true", help="judge nothing")
    parser.add_argument("--verdicts", type=Path, default=VERDICTS)
    parser.add_argument("--references", type=Path, help="keep runs under python here, and use those that are there")
    parser.add_argument("--quick", action="store_true", help="run what is compared with in children of this process")
    parser.add_argument("--noise", action="store_true", help="measure it for all, not only where it matters")
    parser.add_argument("--new", action="store_true", help="judge only those without a verdict")
    arguments = parser.parse_args()
    arguments.verdicts.parent.mkdir(exist_ok=True)
    known = results.read(arguments.verdicts)
    for program in PROGRAMS:
        is_known = arguments.new and program.name in known
        if arguments.draw or is_known or program.missing or (arguments.only and program.name not in arguments.only):
            continue
        kept = arguments.references / program.name if arguments.references else None
        verdict = judge(program, arguments.noise, kept, strict=True, quick=arguments.quick)
        results.add(arguments.verdicts, verdict)
        known[program.name] = verdict
        state = "same" if not verdict.faults else "; ".join(verdict.faults)
        limits = f"{verdict.printed}/{verdict.saved}"
        print(f"{program.name:28} {verdict.path:10} {verdict.seconds[1]:6.1f} s  {limits:22} {state}", flush=True)
        for what in verdict.strict:
            print(f"{'':28} {what}", flush=True)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text(render(known), encoding="utf-8")


if __name__ == "__main__":
    main()
