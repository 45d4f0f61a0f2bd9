"""Boot code of a `multiprocessing` child, executed as text with the names SESSION and PLACE.

On an error the child runs as under plain `python`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session


def enter(session: Session, place: str) -> None:
    """Load Gemini from the folder of the parent process, and install the hook."""
    import sys

    if "gemini.launcher.process.launch_session" in sys.modules:
        from gemini.launcher.process.launch_session import current

        if current() is not None:  # forked by a server that has the hook
            return
    if "gemini" not in sys.modules:
        folder = place.rpartition("/launcher/")[0]
        external = sys.modules["_frozen_importlib_external"]
        spec = external.spec_from_file_location("gemini", folder + "/__init__.py", submodule_search_locations=[folder])
        sys.modules["_frozen_importlib"]._load(spec)
    from gemini.launcher.process.bootstrap import begin_child

    begin_child(session)


if "SESSION" in globals():
    try:
        enter(globals()["SESSION"], globals()["PLACE"])
    except Exception as fault:
        import sys

        sys.stderr.write(f"gemini_python: {type(fault).__name__}: {fault}; the child runs under plain python\n")
