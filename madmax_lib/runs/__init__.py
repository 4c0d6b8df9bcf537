"""Real training runs: models, data, every parallel dimension, launcher, meters; the only room that imports torch."""
