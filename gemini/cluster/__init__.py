"""Clusters as data: device classes, hosts and link tiers, and the time of collectives on them. Imports no framework."""

from gemini.cluster.cluster_description import Cluster, HostGroup
from gemini.cluster.cluster_file import load_cluster, read_cluster
from gemini.cluster.device_class import DeviceClass
from gemini.cluster.link_tier import LinkTier

__all__ = ["Cluster", "DeviceClass", "HostGroup", "LinkTier", "load_cluster", "read_cluster"]
