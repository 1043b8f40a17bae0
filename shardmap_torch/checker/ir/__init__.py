"""The typed program that an interpretation records: equations, paths, repairs."""
