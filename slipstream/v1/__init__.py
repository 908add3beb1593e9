"""Generated internal stubs (scripts/proto); do not edit."""
