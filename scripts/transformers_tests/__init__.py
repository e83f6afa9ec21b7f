"""Parts of transformers_suite.py: the folder of tests, a plugin of pytest that patches, what its records come to."""
