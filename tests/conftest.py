"""For all tests: examples that hypothesis makes up may take as long as a busy machine makes them."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("gemini", deadline=None)
settings.load_profile("gemini")
