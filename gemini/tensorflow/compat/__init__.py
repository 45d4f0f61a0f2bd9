"""TensorFlow 1 on TensorFlow 2: the names of TensorFlow 1 that `tf.compat.v1` has lost, for scripts of its time.

    tf1.py          the module `tensorflow` of TensorFlow 1: `tf.compat.v1`, and tables of the names below
    graph_mode.py   the same, after switching this process to graphs and sessions
    contrib.py      tf.contrib: tables of names, with contrib_layers.py and contrib_functions.py
    estimator.py    tf.estimator, with tpu_estimator.py, run_config.py, …

The pass `tensorflow-imports` puts these modules in the place of `tensorflow` where a file uses TensorFlow 1's names.
What is not here raises an error that says so; nothing is accepted without effect.
"""
