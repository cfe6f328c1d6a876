"""How fast the engine is on a CPU, how good its rounded weights are, and how peers do beside it."""
