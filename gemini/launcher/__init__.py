"""Unmodified programs: which of a script's models are trained, and how their training comes to run in workers.

gemini_python train.py
    arming        the program's process waits for torch; a program without torch pays nothing
    recognition   parameters go to an optimizer → the outermost module that is called with them is a model
    choosing      workers and micro-batches where the configuration leaves them open
    forced        a mode was asked for: the model is pipelined, whatever it gains
    auto          two steps are timed, a plan is made; workers are started where it gains
    bounding      whether a plan can gain at all
    summary       what was found, on standard error
    showing       exceptions that end the program, without frames of ours
"""
