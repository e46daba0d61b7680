"""Memory that torch and JAX share."""
