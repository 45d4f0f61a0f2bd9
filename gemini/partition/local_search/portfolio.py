"""What the other partitioners look at and answer: nobody who begins with it is slower than they are."""

from __future__ import annotations

import random
from dataclasses import replace

from gemini.errors import MissingEngineError, PartitionError
from gemini.partition.acyclic import acyclic_answers
from gemini.partition.baseline import equal_layer_stages
from gemini.partition.local_search.score import Answer, judge, within_slack
from gemini.partition.metis.metis_partitioner import metis_answers
from gemini.partition.multilevel import multilevel_answers
from gemini.partition.partition_problem import Problem


def others(problem: Problem) -> tuple[list[Answer], list[Answer], list[PartitionError]]:
    """All that others look at, contiguous cuts among it; what they answer; and why where they do not."""
    found: list[Answer] = []
    chosen: list[Answer] = []
    faults: list[PartitionError] = []
    looks = [equal_layers, _acyclic, metis_answers]
    if problem.options.mixed is False:
        looks.append(multilevel_answers)
    for look in looks:
        try:
            answers = look(problem)
        except MissingEngineError:
            continue
        except PartitionError as fault:
            faults.append(fault)
            continue
        if answers:
            found += answers
            chosen.append(within_slack(answers, problem.options.slack))
    return found, chosen, faults


def _acyclic(problem: Problem) -> list[Answer]:
    plain = replace(problem, options=replace(problem.options, mixed=None))
    return acyclic_answers(plain, random.Random(problem.options.seed))


def equal_layers(problem: Problem) -> list[Answer]:
    """The baseline's answer, where it has one."""
    stage_of = equal_layer_stages(problem)
    return [] if stage_of is None else [judge(problem, stage_of, range(problem.nparts), "equal layers")]
