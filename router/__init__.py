"""The front door: OpenAI HTTP in, worker Sessions out; no torch, no Ray."""
