"""What a script says in the language of a deep-learning framework: models, layers, losses, loops and the rest.

    finding.py      Finding, one recognised piece of source, and the kinds there are
    vocabulary.py   Vocabulary: how one framework's names map to kinds
    pytorch.py, tensorflow.py    the tables, data only
    evidence.py     what a file tells about its names: classes and their bases, what variables hold
    calls.py        call by call: layers, ops, losses, optimizers, data, devices, checkpoints
    loops.py        statement by statement: model functions, training and evaluation loops, steps
    recognise.py    all of it over a list of files

Recognition reads source only; neither PyTorch nor TensorFlow is imported.
"""

from gemini.instrument.inspect.finding import KINDS, Finding, Kind
from gemini.instrument.inspect.recognise import recognise

__all__ = ["KINDS", "Finding", "Kind", "recognise"]
