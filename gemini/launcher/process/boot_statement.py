"""The statement of ours that runs before the user's first, in the interpreter that has just started.

Only the code object of `boot` travels. It runs where nothing may be taken for granted: the folder of the file it came
from is first on `sys.path`, and any module of Gemini's may be shadowed. So it imports nothing by search: it loads
Gemini from the folder that the launcher was loaded from, and lets `begin` do the rest.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.launcher.process.bootstrap import Plan


def boot() -> None:
    """Run `begin` with the launcher's plan; if that cannot be done, become plain `python`."""
    import posix
    import sys

    plan: Plan = globals()["PLAN"]
    try:
        if plan["descriptor"] is not None:
            posix.close(plan["descriptor"])
        else:
            posix.unlink(plan["opened"])
            posix.rmdir(plan["opened"].rpartition("/")[0])
        if not getattr(sys.flags, "safe_path", sys.flags.isolated):
            del sys.path[0]  # the folder of the file that this came in
        if "gemini" not in sys.modules:
            external = sys.modules["_frozen_importlib_external"]
            folder = plan["gemini"]
            spec = external.spec_from_file_location(
                "gemini", folder + "/__init__.py", submodule_search_locations=[folder]
            )
            sys.modules["_frozen_importlib"]._load(spec)
        from gemini.launcher.process.bootstrap import begin

        begin(plan)
    except Exception as fault:
        if plan["plain"] is None:
            raise
        sys.stderr.write(f"gemini_python: {type(fault).__name__}: {fault}; running under plain python\n")
        sys.stderr.flush()
        posix.execv(sys.executable, [sys.executable, *plan["plain"]])
