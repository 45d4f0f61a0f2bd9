"""Reports of a run: the journal of its steps and traces of what every worker did."""
