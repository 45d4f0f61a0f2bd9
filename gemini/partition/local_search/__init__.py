"""Search: what the partitioners that improve an answer step by step share.

An answer under change is a `State`: items in *blocks*, numbered so that values only flow to equal or higher numbers,
and the worker of each block. With one block a worker it is a plain pipe; with several, a mixed one. Orders and starts
make the first answer, refinement improves it, staging turns workers of items into stages, judging compares and
finishes.
"""
