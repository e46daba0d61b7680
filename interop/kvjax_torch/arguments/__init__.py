"""Checks of the operations' arguments, and the plans that they become."""
