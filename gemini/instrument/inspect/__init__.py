"""Recognition of deep-learning source: models, layers, losses, optimizers, loops; and pictures of syntax trees.

    finding               Finding, one recognised piece of source, and its kinds
    vocabulary            Vocabulary: how the names of one framework map to kinds
    *_vocabulary          the tables of PyTorch and TensorFlow, data only
    name_evidence         classes and their bases, and the values of variables
    call_findings         calls: layers, ops, losses, optimizers, data, devices, checkpoints
    statement_findings    statements: model functions, training and evaluation loops, steps
    recognise             all of them over a list of files
    ast_outline, ast_folds, ast_picture    the syntax tree as an outline, folded, and drawn

Recognition reads source only; neither PyTorch nor TensorFlow is imported.
"""

from gemini.instrument.inspect.finding import KINDS, Finding, Kind
from gemini.instrument.inspect.recognise import recognise

__all__ = ["KINDS", "Finding", "Kind", "recognise"]
