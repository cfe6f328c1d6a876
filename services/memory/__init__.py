"""The memory watch of a process: what it and its control group use, how near the limit that is, and what is done."""
