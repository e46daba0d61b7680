"""What kvjax's times are held against."""
