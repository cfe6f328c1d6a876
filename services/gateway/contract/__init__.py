"""Translates between the contract (sluice.v1) and the messages of the ring: requests, answers, errors. Pure."""
