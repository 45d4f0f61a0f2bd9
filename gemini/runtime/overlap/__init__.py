"""The overlapped path: a model's calls are put off until `backward()`, and whole steps run in the workers by a plan."""
