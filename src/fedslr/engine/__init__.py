"""Engines run methods.

`rounds` is the loop of a run and `training` the training of one cohort. The `eager` engine trains one client after
another, `batched` trains a cohort at once, and `cuda` replays recorded graphs on a GPU. `distributed` divides the
clients between several processes.
"""
