"""Generated public stubs (scripts/proto); do not edit."""
