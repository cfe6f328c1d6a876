"""Programs that peers run in environments of their own; nothing here is imported by ours."""
