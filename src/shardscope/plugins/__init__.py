"""IN OTHERS' PROGRAMS: what runs inside trainers and test runners; may import every room."""
