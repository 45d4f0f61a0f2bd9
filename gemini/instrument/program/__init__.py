"""The files of a user's program: code tree, ownership, module search, package data."""
