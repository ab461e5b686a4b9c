"""Policies and chat formats: everything that knows tokens. Knows nothing of trainers."""
