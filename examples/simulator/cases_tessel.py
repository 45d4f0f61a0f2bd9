"""Search a schedule for one of the classic placements, and look at what was found.

    python cases_tessel.py --placement vshape --ndevs 4 --nmicros 8 --memory 4
    python cases_tessel.py --placement mshape --ndevs 4 --nmicros 6 --memory 6 --save mshape.4stages.sched.json
    python cases_tessel.py --placement kshape --ndevs 4 --nmicros 6 --memory 6 --infer

A placement is the work of one micro-batch: blocks with a span and a memory, on devices, each depending on the one
before it. `vshape` and `mshape` are built here by hand, to show how to build your own; the others come by name.
"""

import argparse

from gemini.errors import GeminiError
from gemini.schedule import Block, Composer, SchedPlan, placement
from gemini.schedule.phases import find_phases


def vshape(ndevs: int, infer: bool) -> SchedPlan:
    """Stages one after the other: forward down the devices, backward up again."""
    forwards = [Block(0, span=1, memory=1, btype="forward") for _ in range(ndevs)]
    backwards = [Block(0, span=3, memory=-1, btype="backward") for _ in range(ndevs)]
    down, up = list(range(ndevs)), list(reversed(range(ndevs)))
    plan = SchedPlan(ndevs)
    if infer:
        plan.add_block_seq(forwards, down)
    else:
        plan.add_block_seq(forwards + backwards, down + up)
    return plan


def mshape(ndevs: int, infer: bool) -> SchedPlan:
    """A pipeline between two blocks that all devices share: a large embedding before, its backward after."""
    everyone = tuple(range(ndevs))
    embed = Block(0, span=1, memory=0, btype="forward")
    forwards = [Block(0, span=1, memory=1, btype="forward") for _ in range(ndevs)]
    backwards = [Block(0, span=3, memory=-1, btype="backward") for _ in range(ndevs)]
    embed_back = Block(0, span=1, memory=0, btype="backward")
    down, up = list(range(ndevs)), list(reversed(range(ndevs)))
    plan = SchedPlan(ndevs)
    if infer:
        plan.add_block_seq([embed, *forwards], [everyone, *down])
    else:
        plan.add_block_seq([embed, *forwards, *backwards, embed_back], [everyone, *down, *up, everyone])
    return plan


BUILT_HERE = {"vshape": vshape, "mshape": mshape}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--placement", default="vshape", help="vshape, mshape, or any name that gemini schedule knows")
    parser.add_argument("--ndevs", type=int, default=4, help="devices")
    parser.add_argument("--nmicros", type=int, default=8, help="micro-batches to unroll the schedule to")
    parser.add_argument("--memory", type=float, default=None, help="memory of every device (default: no limit)")
    parser.add_argument("--save", default=None, help="write the schedule to this JSON file")
    parser.add_argument("--infer", action="store_true", help="forward only")
    args = parser.parse_args()

    build = BUILT_HERE.get(args.placement)
    blocks = build(args.ndevs, args.infer) if build else placement(args.placement, args.ndevs, not args.infer)
    print("placement, one micro-batch:", blocks, sep="\n", end="\n\n")

    schedule = Composer.compose(blocks, args.memory)
    print("schedule:", schedule, sep="\n", end="\n\n")

    unrolled = schedule.unroll(args.nmicros)
    unrolled.validate()
    print(f"unrolled to {args.nmicros} micro-batches:", unrolled, sep="\n", end="\n\n")

    print("peak memory:", [unrolled.peak_memory(device) for device in range(args.ndevs)])
    phases = find_phases(unrolled)
    if phases is None:
        print(f"{args.nmicros} micro-batches are too few to show the steady state")
    else:
        print(f"warm-up steps: {phases.begin}")
        print(f"repetend steps: {phases.length}, {phases.kernels} times")
        print(f"cool-down steps: {unrolled.nsteps - phases.end}")
    if args.save:
        print("saved", unrolled.save(args.save))


if __name__ == "__main__":
    try:
        main()
    except GeminiError as error:  # says what is wrong and what to do: no traceback needed
        raise SystemExit(f"cases_tessel.py: {error}") from None
