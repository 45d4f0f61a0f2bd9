"""TensorFlow 1 on TensorFlow 2: the names of TensorFlow 1 that `tf.compat.v1` has lost, for scripts of its time.

    tf1.py               the module `tensorflow` of TensorFlow 1: `tf.compat.v1`, and the names below
    graph_mode.py        the same, after switching this process to graphs and sessions
    contrib.py           tf.contrib, with contrib_layers.py, contrib_rnn.py, …
    estimator_names.py   tf.estimator, with estimator.py, tpu_estimator.py, run_config.py, …
    lazy_names.py        names that are imported on first use

The pass `tensorflow-spelling` puts these modules in the place of `tensorflow` where a file uses TensorFlow 1's names.
What is not here raises an error that says so; nothing is accepted without effect.
"""
