"""The decoder, and nothing about distribution."""
