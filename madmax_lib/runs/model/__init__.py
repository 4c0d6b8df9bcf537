"""What is trained? Layers, networks, losses, fused kernels, adapters, published
weights.
"""
