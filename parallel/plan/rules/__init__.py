"""The rules, by what they are about. Each is a function from a config to the faults it finds."""
