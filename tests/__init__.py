"""What we promise, and the proof."""
