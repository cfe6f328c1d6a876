"""The decoder layer, its MLPs and experts, and their loading from a checkpoint."""
