"""One model over several ranks: what each rank owns, its slices of the weights, and the sums between ranks."""
