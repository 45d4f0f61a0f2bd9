"""For all tests: hypothesis without deadlines, one torch thread, and the markers `unit`, `dist` and `corpus`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("gemini", deadline=None)
settings.load_profile("gemini")

TESTS = Path(__file__).parent

# Prefixes of node ids, relative to this folder: tests that start workers or other processes. All with a `pool` do.
DIST = (
    "cache/test_plan_cache.py::test_another_process_finds_it",
    "cli/test_ast.py::test_nothing_but_the_result_is_said",
    "cli/test_main.py::test_only_the_chosen_command_is_imported",
    "cli/test_misplaced_options.py",
    "cli/test_partition.py::test_json_and_files",
    "cli/test_profile_cli.py::test_the_link",
    "cli/test_python.py",
    "cli/test_saved_files.py",
    "cli/test_schedule_cli.py::test_a_plan_can_be_saved_into_a_pipe",
    "cli/test_schedule_cli.py::test_a_reader_that_goes_away",
    "cli/test_schedule_cli.py::test_as_a_process",
    "cli/test_scripts_in_workers.py",
    "docs/",
    "guards/test_monkeypatches.py",
    "guards/test_reached_values.py",
    "instrument/test_code_tree.py::test_the_tree_holds_all",
    "instrument/test_dsl_tensorflow.py::test_no_framework",
    "instrument/test_dump.py",
    "instrument/test_tensorflow_imports.py::test_the_table",
    "instrument/test_tracebacks.py",
    "launcher/process/",
    "launcher/test_local_step_cost.py",
    "launcher/test_script_api.py",
    "parallel_program/",
    "partition/test_partition_imports.py",
    "pipe/test_stage_folder.py",
    "planner/test_contention.py",
    "planner/test_memory_limits.py",
    "profiling/test_autograd_edges.py",
    "profiling/test_link_profile.py::test_a_backend_that_does_not_exist",
    "profiling/test_link_profile.py::test_two_real_processes",
    "profiling/test_malloc_trim.py",
    "profiling/test_profile_cache.py::test_several_processes",
    "purity/test_impure_programs.py",
    "purity/test_pure_programs.py::test_pure_programs_train",
    "report/test_journal.py",
    "report/test_report_page.py::test_a_real_run",
    "runtime/deferred/test_deferred_interop.py::test_a_child_process",
    "runtime/devices/test_device_registry.py",
    "runtime/devices/test_forked_memory.py",
    "runtime/eager/test_internal_faults.py",
    "runtime/eager/test_remote_exceptions.py",
    "runtime/hosts/",
    "runtime/memory/test_alias_graphs.py",
    "runtime/memory/test_alias_training.py",
    "runtime/pipelined/",
    "runtime/pool/",
    "runtime/test_autograd_engine.py",
    "runtime/test_failure_replay.py",
    "samples/",
    "schedule/test_composer_tutorial.py",
    "schedule/test_schedplan.py::test_importing",
    "schedule/test_tessel_example.py::test_as_a_process",
    "schedule/test_torch_csv.py",
    "tensorflow/test_servers.py",
    "tensorflow/test_tf1_scripts.py",
    "tensorflow/test_traced_functions.py",
    "test_compiler.py",
    "test_framework_free.py",
    "test_layers.py::test_importing",
    "test_public_surface.py::test_importing",
    "test_torch_range.py::test_the_launcher",
)
# Prefixes of node ids: sweeps over many models, scripts, problems or source files, and other long tests.
CORPUS = (
    "batch_analysis/test_random_tapes.py",
    "batch_analysis/test_transformer_losses.py",
    "capture/test_classic_models.py",
    "codegen/test_generated_source.py",
    "codegen/test_stage_equivalence.py",
    "codegen/test_stage_parameters.py",
    "codegen/test_transformer_stages.py",
    "conformance/",
    "instrument/test_corpus.py",
    "instrument/test_source.py",
    "launcher/process/test_cpython_suite.py",
    "launcher/process/test_python_equivalence.py",
    "partition/test_assignment.py",
    "partition/test_exact_baselines.py",
    "partition/test_exact_chunks.py",
    "partition/test_heuristics.py",
    "pipe/test_pipe_equivalence.py",
    "pipe/test_state_dict.py",
    "runtime/deferred/test_deferred_gradients.py::test_nothing_is_left_of_a_step",
    "runtime/eager/test_classic_training.py",
    "runtime/eager/test_zoo_in_workers.py",
    "schedule/test_library_against_torch.py",
    "schedule/test_unroll.py",
)


def _marker(item: pytest.Item) -> str:
    node = f"{item.path.relative_to(TESTS).as_posix()}::{item.name}"
    if node.startswith(CORPUS):
        return "corpus"
    if node.startswith(DIST) or "pool" in getattr(item, "fixturenames", ()):
        return "dist"
    return "unit"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test exactly one of the three markers, and `slow` to the cases that `sampled` leaves out."""
    cases: Counter[str] = Counter()
    for item in items:
        item.add_marker(_marker(item))
        sampled = item.get_closest_marker("sampled")
        if sampled is not None and item.get_closest_marker("slow") is None:
            test = item.nodeid.partition("[")[0]
            if cases[test] % sampled.args[0]:
                item.add_marker("slow")
            cases[test] += 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are faster on one thread, and the other cores are left to other tests."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def trusted_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trust code of the tests like that of a library: modules count their runs, or act on the worker they run in."""
    from gemini.purity import allowances, value_kinds
    from gemini.runtime.pool.worker_pool import WorkerPool
    from tests.trusted_code import TrustedLibraries

    trusted = TrustedLibraries(allowances.LIBRARIES)
    for module in (allowances, value_kinds):
        monkeypatch.setattr(module, "LIBRARIES", trusted)
    await_ready = WorkerPool.await_ready

    def await_and_trust(pool: WorkerPool) -> None:
        await_ready(pool)
        pool.preload(["tests.trusted_code"])

    monkeypatch.setattr(WorkerPool, "await_ready", await_and_trust)
    if "pool" in request.fixturenames:
        await_and_trust(request.getfixturevalue("pool"))
