"""Deployment: the same methods on real machines, with state that survives every fault. Flower carries the messages."""
