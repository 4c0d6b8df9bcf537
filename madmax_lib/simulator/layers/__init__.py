"""What does a layer compute, move and send? Operations of transformers, mixtures and
DLRM.
"""
