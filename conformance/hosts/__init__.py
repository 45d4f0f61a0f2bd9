"""Hosts: network namespaces that stand for machines, and faults of them."""
