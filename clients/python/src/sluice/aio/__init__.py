"""The client for asyncio: the same as its blocking twin in everything that is not waiting."""
