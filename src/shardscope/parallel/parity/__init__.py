"""Does the parallel version compute what the single device does?"""
