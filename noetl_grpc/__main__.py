"""python -m noetl_grpc"""

from noetl_grpc.cli import main

if __name__ == "__main__":
    main()
