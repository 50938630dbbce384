"""Meshes and process groups, and the only file that communicates."""
