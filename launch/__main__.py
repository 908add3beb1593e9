"""`python -m launch`: the `slipstream` command where the package is not installed, as in the working_dir of a Ray job."""

from launch.cli import main

if __name__ == "__main__":
    main()
