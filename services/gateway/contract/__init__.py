"""The contract and the ring, each in the other's words: requests, answers, errors. Pure."""
