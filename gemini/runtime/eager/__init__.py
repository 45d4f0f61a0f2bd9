"""Eager dispatch: the controller runs the forward; placed modules are remote calls with autograd."""
