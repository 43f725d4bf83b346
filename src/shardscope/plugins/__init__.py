"""Plugins that run inside trainers and test runners; they may import every other package."""
