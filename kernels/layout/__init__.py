"""Memory layouts: a step's tokens in the paged cache, the rows of a ragged batch, draft trees and shared prefixes."""
