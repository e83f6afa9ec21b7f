"""Products of int8 matrices by AMD's Composable Kernel: device source, host checks and ctypes binding."""
