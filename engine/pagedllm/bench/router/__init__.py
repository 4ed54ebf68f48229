"""Simulated replicas under the real router."""
