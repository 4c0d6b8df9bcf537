"""How is training split over ranks? Mesh, data, tensors, pipeline, experts, optimizers,
checkpoints.
"""
