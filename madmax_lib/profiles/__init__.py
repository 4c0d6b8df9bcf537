"""How long does each layer take on each GPU type, and which GPUs stand in which node?

Layer profiles and clusters in the files of Metis [Um et al., USENIX ATC 2024], read, checked, generated and written.
"""

from madmax_lib.profiles.cluster import Node, load_cluster, write_cluster
from madmax_lib.profiles.generate import generate_profiles
from madmax_lib.profiles.layers import LayerProfile, Profiles, load_profiles, plain_sum, write_profiles

__all__ = [
    "LayerProfile", "Node", "Profiles", "generate_profiles", "load_cluster", "load_profiles", "plain_sum",
    "write_cluster", "write_profiles",
]  # fmt: skip
