"""Runs an engine directory: sessions, the decode loop and the ranks; see README.md of this folder."""
