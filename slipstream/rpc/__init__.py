"""gRPC channels, servers and conversions; knows no role."""
