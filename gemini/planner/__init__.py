"""The planner: from a model, a batch and a number of workers to the plan of a step."""
