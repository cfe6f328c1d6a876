"""Vectors beside peers, and what a flood of texts for vectors does to generations."""
