"""HOW IT IS SHOWN: a Recording in; text, Perfetto, CSV out. Imports `record` alone."""
