"""What every Slipstream process shares; knows no role. Importing it does nothing."""

__version__ = "0.1.0"
