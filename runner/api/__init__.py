"""Operations on runs, shared by the command line, the Python API and the server."""
