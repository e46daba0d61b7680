"""Adapters that use kvjax's caches under other libraries."""
