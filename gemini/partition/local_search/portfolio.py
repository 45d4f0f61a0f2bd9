"""Portfolio: the candidates of the baseline, `acyclic` and `metis`, as a bound for the other partitioners."""

from __future__ import annotations

import random
from dataclasses import replace

from gemini.errors import MissingEngineError, PartitionError
from gemini.partition.acyclic import acyclic_candidates
from gemini.partition.baseline import equal_layer_stages
from gemini.partition.local_search.score import Candidate, evaluate, select_within_slack
from gemini.partition.metis.metis_partitioner import metis_candidates
from gemini.partition.multilevel import multilevel_candidates
from gemini.partition.partition_problem import Problem


def run_portfolio(problem: Problem) -> tuple[list[Candidate], list[Candidate], list[PartitionError]]:
    """Return all candidates, the selected candidate of each partitioner, and the errors of those that fail."""
    found: list[Candidate] = []
    chosen: list[Candidate] = []
    faults: list[PartitionError] = []
    methods = [equal_layer_candidates, _acyclic_candidates, metis_candidates]
    if problem.options.mixed is False:
        methods.append(multilevel_candidates)
    for method in methods:
        try:
            candidates = method(problem)
        except MissingEngineError:
            continue
        except PartitionError as fault:
            faults.append(fault)
            continue
        if candidates:
            found += candidates
            chosen.append(select_within_slack(candidates, problem.options.slack))
    return found, chosen, faults


def _acyclic_candidates(problem: Problem) -> list[Candidate]:
    plain = replace(problem, options=replace(problem.options, mixed=None))
    return acyclic_candidates(plain, random.Random(problem.options.seed))


def equal_layer_candidates(problem: Problem) -> list[Candidate]:
    """Return the baseline's candidate, if it has one."""
    stage_of = equal_layer_stages(problem)
    return [] if stage_of is None else [evaluate(problem, stage_of, range(problem.nparts), "equal layers")]
