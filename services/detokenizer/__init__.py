"""Token ids to text as it becomes certain: incremental decoding and stop strings."""
