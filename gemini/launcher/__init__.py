"""Launcher: runs an unmodified program as `python` would, and trains its models with workers.

gemini_python train.py
    process/            the program's process: bootstrap, import hook, child processes
    script_api/         the functions that instrumented source calls as `__gemini__`
    torch_import_hook   starts model discovery when the program imports torch; other programs pay nothing
    model_discovery     parameters of an optimizer → the outermost module called with them is a model
    policy              what happens to a model: workers, or this process
    defaults            workers and micro-batches that the configuration leaves open
    auto                times two steps and plans; starts workers where the plan is faster
    speedup_bound       whether a plan can be faster at all
    dry_run             plans and reports without training
    run_summary         the plan, on standard error
    excepthook          tracebacks without frames of Gemini
"""
