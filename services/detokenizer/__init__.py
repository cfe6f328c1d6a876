"""Turns token ids into text as it becomes certain: incremental decoding, stop strings, reasoning and tool calls."""
