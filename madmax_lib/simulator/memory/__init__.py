"""How many bytes does a device hold, and of what? Weights, gradients, optimizer,
activations.
"""
