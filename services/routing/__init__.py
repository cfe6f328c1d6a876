"""The choice of an engine for a prompt, by what each engine's prefix cache holds and has to do. Pure."""
