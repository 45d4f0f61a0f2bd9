"""Instrumented source for people: dumps that plain `python` runs, headers and patches."""

from __future__ import annotations

DUMP_MARKER = ".gemini-dump.json"
"""The file that marks a folder as a dump and lists its modules."""
