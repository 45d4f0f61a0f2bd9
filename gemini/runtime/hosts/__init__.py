"""Hosts: starting worker processes on this host, and workers on other machines, which share no memory."""
