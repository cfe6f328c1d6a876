"""What is measured, how, and the results."""
