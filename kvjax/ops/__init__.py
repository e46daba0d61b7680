"""The public operations on a cache; each module holds one, with its XLA form beside it."""
