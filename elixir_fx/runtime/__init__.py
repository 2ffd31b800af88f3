"""What carries out a plan while the generated step runs: memory, transfers, parameters."""
