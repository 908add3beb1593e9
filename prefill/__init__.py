"""The prefill half: computes prompts and serves their state."""
