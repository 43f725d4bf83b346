"""The compiler: debugging backends, explanations of graph breaks, diagnosis of wrong results."""
