"""Cache blocks that engines of one host pass to each other through shared memory."""
