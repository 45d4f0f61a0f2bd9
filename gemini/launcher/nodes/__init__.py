"""Nodes: `gemini_python` as torchrun, mpirun, srun or horovodrun start it, once per node."""
