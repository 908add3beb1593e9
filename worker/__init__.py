"""What prefill and decode workers have in common; knows no role."""
