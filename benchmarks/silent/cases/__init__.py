"""Silent bugs of distributed training, each a small program in a buggy and a corrected variant."""
