"""The decision to share images between ranks."""
