"""Is what the compiler made right, and if not, what is to blame?"""
