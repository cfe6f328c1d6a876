"""What travels round the ring: messages, the work that they ask for, and the details that they carry."""
