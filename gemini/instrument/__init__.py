"""Reads Python source and changes it on its own lines.

In the order of the flow:

    lines, source      bytes → text, tree, positions
    index, names, unit what a pass sees: nodes by type, parents, scopes, resolved names
    passes/            the passes; `pattern` for the declarative ones; `registry` finds them all
    edits, splice      what passes ask for, made in the text; `positions` is the way back
    prelude            the one import that instrumented files carry
    manager            schedules the passes, runs them over a file, verifies what they did

Nothing here imports a framework.
"""
