"""Models on several devices."""
