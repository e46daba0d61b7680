"""Programs to read and to run; `llama` is imported by tests too."""
