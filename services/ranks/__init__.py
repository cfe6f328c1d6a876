"""The processes of a group of ranks: what they tell each other over sockets, and the life of a rank's process."""
