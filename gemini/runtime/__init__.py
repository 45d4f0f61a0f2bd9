"""The run time: worker processes, the memory and links that they share with the controller, and the paths of a call."""
