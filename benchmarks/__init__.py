"""What kvjax's operations cost on a device, next to a copy and to plain CUDA. Run from the source tree."""
