"""kvjax's caches under other libraries: adapters, and what each library has to be told."""
