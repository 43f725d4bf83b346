"""Silent bugs of real distributed training, each in a small program that is wrong or corrected."""
