"""Instrumented source for people: dumps with a header, patches, and what is new in a tree."""
