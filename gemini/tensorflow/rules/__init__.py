"""Rules of forward ops: how each runs on pieces of its inputs."""
