"""Hangs of distributed training from the public record, rebuilt as small programs."""
