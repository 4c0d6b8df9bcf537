"""How is training split over ranks? Mesh, sharding, tensors, pipeline, experts, optimizers, checkpoints."""
