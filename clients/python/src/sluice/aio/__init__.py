"""The client for asyncio: the same behaviour as the blocking client."""
