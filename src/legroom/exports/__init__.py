"""The plan and the facts of a release, written in the forms other tools read, and the reading of such files."""
