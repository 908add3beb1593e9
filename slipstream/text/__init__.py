"""Text and pictures to tokens and back; no torch."""
