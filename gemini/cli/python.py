"""`gemini_python`: runs a Python program as `python` would, instrumented."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

    from gemini.cli.launcher_flags import Invocation
    from gemini.launcher.process.launch_session import Session

USAGE_ERROR = 2
_LAUNCHED = {"RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}  # set by launchers
SPECIAL_RUN = "from gemini.cli.python import run_specially; run_specially()"


def main() -> NoReturn:
    """Run the console script `gemini_python`."""
    _put_library_first()
    from gemini.errors import GeminiError

    try:
        sys.exit(run(sys.argv[1:]))
    except GeminiError as fault:
        print(f"gemini_python: {fault}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    except KeyboardInterrupt:
        _end_by_interrupt()


def run(argv: list[str]) -> int:  # noqa: RET503 - `start` does not return
    """Run the program of the arguments; return the exit code only where none is run."""
    from gemini.cli import launcher_flags

    invocation = launcher_flags.parse(argv)
    if invocation.has("--help"):
        print(launcher_flags.help_text())
        return 0
    if invocation.has("--version"):
        print(_version())
        return 0
    if invocation.kind == "nothing":
        if any(flag in launcher_flags.PYTHON_HELP for flag in invocation.flags):
            _run_plain(invocation)
        if os.isatty(0):
            print(launcher_flags.usage(), file=sys.stderr)
            print("    → name a program; gemini_python --help lists the options", file=sys.stderr)
            return USAGE_ERROR
        invocation.kind = "stdin"
    if invocation.has("--no-gemini"):
        _run_plain(invocation)
    quiet = _check(invocation)
    if invocation.has("--dump") or invocation.has("--diff"):
        return _show(invocation)
    code = _serve_nodes(invocation, quiet)
    if code is not None:
        return code
    from gemini.launcher.process.launch import start
    from gemini.torch_range import check_torch

    check_torch()
    start(invocation, _session(invocation, quiet))


def _serve_nodes(invocation: Invocation, quiet: bool) -> int | None:
    """Take part in a run on several nodes; return the exit code, or None where this process runs the script."""
    if not _LAUNCHED & os.environ.keys():
        return None
    from gemini.launcher.nodes import node_launch
    from gemini.launcher.nodes.launch_variables import find_node_rank

    node = find_node_rank()
    if node is None or invocation.kind not in ("script", "module"):
        return None
    call = node_launch.find_distributed_call(invocation)
    if call:
        if node.rank == 0 and not quiet:
            print(f"gemini_python: {invocation.target} {call}: it runs as under python", file=sys.stderr)
        _run_plain(invocation)
    return node_launch.run_script(node) if node.rank == 0 else node_launch.run_agent(node)


def run_specially() -> NoReturn:
    """Run a program for another command: `record` or `check`, a path, a number, then arguments of `gemini_python`."""
    _put_library_first()
    from gemini.cli import launcher_flags
    from gemini.launcher.process.launch import start

    purpose, path, steps, *words = sys.argv[1:]
    invocation = launcher_flags.parse(words)
    session = _session(invocation, quiet=False)
    if purpose == "record":
        session["record"], session["record_steps"] = path, int(steps)
    else:
        session["check"] = path
    start(invocation, session)


def _put_library_first() -> None:
    """Put the user's folders last on the launcher's search path: a ``types.py`` in them must not shadow the library."""
    from gemini.launcher.process.import_isolation import library_path

    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        del sys.path[0]
    library = library_path()
    sys.path[:] = [*library, *(entry for entry in sys.path if entry not in library)]


def _run_plain(invocation: Invocation) -> NoReturn:
    from gemini.launcher.process import become_python

    become_python.exec_python(invocation.arguments())


def _session(invocation: Invocation, quiet: bool) -> Session:
    config = invocation.last("--config")
    return {
        "passes": invocation.names("--passes"),
        "skip": invocation.names("--skip-pass"),
        "registered": [],
        "triggers": [],
        "instrument": invocation.names("--instrument"),
        "flags": invocation.settings(),
        "config": None if config is None else os.path.abspath(config),
        "quiet": quiet,
        "main": None,
    }


def _check(invocation: Invocation) -> bool:
    """Check the configuration before the program starts; return its `quiet`."""
    settings = invocation.settings()
    if not settings and not invocation.has("--config") and not os.environ.get("GEMINI_CONFIG"):
        return False
    from gemini.config.gemini_config import GeminiConfig
    from gemini.planner.config_planner import check_config

    config = GeminiConfig.load(invocation.last("--config"), flags=settings)
    check_config(config)
    if not _LAUNCHED & os.environ.keys() and "GEMINI_NODES" not in os.environ:
        config.check_replicated()
    if config.cluster is not None or config.device_mapping is not None:
        from gemini.runtime.hosts.host_cluster import check_cluster

        check_cluster(config)
    if config.report is not None:
        from gemini.report.run_end import check_report

        check_report(config)
    return config.quiet


def _show(invocation: Invocation) -> int:
    """Write the instrumented program, or print its patch."""
    from pathlib import Path

    from gemini.errors import UsageError

    if invocation.kind not in ("script", "module"):
        option = "--dump DIR" if invocation.has("--dump") else "--diff"
        raise UsageError(f"{option} needs a script or a module\n    → gemini_python {option} train.py")
    from gemini.cli.dump import show

    target, folder = invocation.target, invocation.last("--dump")
    return show(
        target if invocation.kind == "script" else None,
        target if invocation.kind == "module" else None,
        output=Path(folder) if folder is not None else None,
        diff=invocation.has("--diff"),
        passes=invocation.names("--passes"),
        skip=invocation.names("--skip-pass"),
        packages=invocation.names("--instrument"),
    )


def _version() -> str:
    import platform

    from gemini import __version__

    return f"gemini {__version__} (Python {platform.python_version()}, {sys.executable})"


def _end_by_interrupt() -> NoReturn:
    """End by SIGINT, so that a shell stops too."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(130)


if __name__ == "__main__":
    main()
