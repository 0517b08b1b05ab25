"""Client states, checkpoints, run folders and their records on disk."""
