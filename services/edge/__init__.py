"""OpenAI's HTTP API in front of the contract: a pure client of sluice.v1 that knows nothing of our processes."""
