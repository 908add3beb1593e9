"""Schedules and runs steps on one rank; knows no network, no Ray and no role."""
