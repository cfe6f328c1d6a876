"""The decoder layer, its MLPs and experts: what they are made of, and how they are read from a checkpoint."""
