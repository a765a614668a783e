"""Copied to every host of a training job."""
