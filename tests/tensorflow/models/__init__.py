"""Small models in the style of public TensorFlow 1 programs, for the tests of the engine."""
