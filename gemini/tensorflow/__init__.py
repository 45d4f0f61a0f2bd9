"""TensorFlow: training steps of TensorFlow graphs in parallel, with the numbers of one device.

The graph of the script is never changed. Its calls of `tf.gradients` are noted, and the session of the script runs a
*twin* of the graph: the forward part copied per micro-batch, stage and shard, differentiated by TensorFlow itself, with
the rest of the training graph (clipping, optimizers, savers) attached to the new gradients. Start with `entry.py`.
"""
