# Every target first sets up what it needs, in .venv, and is quick when nothing is missing (scripts/setup.sh).
# TORCH names another torch than the pinned one: `installed` is the one that PYTHON already has, and anything else a
# requirement of pip's, such as the path of a wheel. The choice holds until another is named.

PYTHON ?= python3
TORCH ?= $(or $(shell cat .venv/torch 2>/dev/null),pinned)
RECIPE ?= int8
PROMPT ?= What is the capital of France?
PYTEST ?= -n 2 --dist loadfile --no-loadscope-reorder
MARKED ?= not nightly
# The lower end of the range in pyproject.toml.
OLDEST := transformers==5.10.1
# HIP and Triton kernels compiled for AMD, CPU kernels for ARM and run under qemu, the jit's table and examples assembled
# for AMD and its loops held to the HIP compiler's; then the numbers of the Triton kernels, through Triton's interpreter.
# What takes minutes runs where something that it reads has changed since it passed (scripts/unchanged.py).
UNCHANGED := .venv/bin/python scripts/unchanged.py
# Of the HIP kernels' numbers, on a CPU.
EMULATED := $(sort $(wildcard tests/kernels/hip/test_*_emulated.py))
INTERPRETED := PYTHONPATH=.venv/gate TRITON_INTERPRET=1 .venv/bin/python -m pytest -q -n 2 -m "$(MARKED)"
GATE := .venv/bin/python scripts/amd_gate.py --wheels .venv/gate \
	&& $(UNCHANGED) composable_kernel scripts/ck_gate.py accelpatch/kernels/ck \
		-- .venv/bin/python scripts/ck_gate.py --wheels .venv/gate \
	&& $(UNCHANGED) cpu_kernels_for_arm scripts/wheel_gate.py scripts/gates/run_calls.cpp accelpatch/kernels/cpu \
		tests/kernels/cpu/harness.cpp tests/kernels/cpu/harness.h \
		-- .venv/bin/python scripts/wheel_gate.py --wheels .venv/gate \
	&& .venv/bin/python scripts/jit_gate.py --wheels .venv/gate \
	&& $(UNCHANGED) triton_compiled scripts/triton_gate.py \
		-- env PYTHONPATH=.venv/gate .venv/bin/python -W ignore scripts/triton_gate.py \
	&& $(UNCHANGED) triton_interpreted tests/kernels/triton tests/kernels/ops/attention tests/kernels/ops/sampling \
		tests/kernels/ops/step tests/conftest.py accelpatch/kernels pyproject.toml -- env $(INTERPRETED) tests/kernels/triton \
		tests/kernels/ops/attention tests/kernels/ops/sampling tests/kernels/ops/step \
	&& $(INTERPRETED) tests/test_contributing.py::test_the_triton_kernel_of_a_chapter tests/test_own_kernels.py \
		tests/test_examples.py::test_my_gemv_triton tests/kernels/compiling/test_compile_file.py \
		tests/tuning/hipblaslt/test_triton.py

.PHONY: help run test test-all lint bench gate gate-all smoke wheel force

help:
	@echo 'make run     load the default model, patch it with a recipe, answer a prompt   [RECIPE=int8 PROMPT="..."]'
	@echo 'make bench   time the default model before and after                           [RECIPE=int8]'
	@echo 'make test    lint, gate, all tests, and the smoke tests on the oldest transformers   [PYTEST="-k name"]'
	@echo 'make test-all  the same, and what takes minutes and only repeats it in another way'
	@echo 'make gate    compile the GPU kernels for AMD, no GPU needed, and hold them to scripts/amd_gate.json; run the CPU'
	@echo '             kernels for ARM under qemu'
	@echo 'make gate-all  the same, every instance of Composable Kernel, and NVIDIA archs that no test runs on: needs nvcc,'
	@echo '               and an hour on two cores'
	@echo 'make lint    ruff, mypy and clang-format'
	@echo 'make wheel   wheels in dist/ with the CPU kernels in them, for x86-64 and 64-bit ARM'
	@echo 'Each sets up .venv by itself. Another torch: make TORCH=installed run, make TORCH=/path/of/a/wheel run,'
	@echo 'make TORCH="torch --index-url URL" run; back to the pinned one: make TORCH=pinned run.'

run: .venv/ready
	.venv/bin/accelpatch run --recipe $(RECIPE) --prompt "$(PROMPT)" --compare

bench: .venv/ready
	.venv/bin/accelpatch bench --recipe $(RECIPE)

lint: .venv/ready
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	git ls-files '*.h' '*.hip' '*.cpp' '*.inc' '*.cu' | xargs -r .venv/bin/clang-format --dry-run -Werror

# Where its compilers are neither there nor may be installed it is skipped; with CI=true that is a failure.
gate: .venv/ready
	@if sh scripts/setup.sh gate; then $(GATE); \
	elif [ "$$CI" = true ]; then echo 'gate: not run, and CI=true makes that a failure' >&2; exit 1; \
	else echo 'gate: SKIPPED, the kernels for AMD and ARM were not compiled'; fi

# Archs that are compiled and not run; outside of make test.
gate-all: gate
	.venv/bin/python scripts/amd_gate.py --wheels .venv/gate --all
	@if [ -d .venv/gate/aiter_meta ]; then .venv/bin/python scripts/ck_gate.py --wheels .venv/gate --all; fi
	.venv/bin/python scripts/nvidia_gate.py

wheel: .venv/ready
	@sh scripts/setup.sh wheel
	.venv/bin/python scripts/build_wheel.py --wheels .venv/wheel

# Of the files that have such tests alone: collecting all takes longer than running these.
smoke: .venv-oldest/ready
	.venv-oldest/bin/python -m pytest -q -m smoke $(sort $(shell grep -rl smoke tests --include='test_*.py'))

# Side by side, since each leaves cores idle for a while; what a stage says comes in one piece, when it ends.
test: export OMP_NUM_THREADS = 1
test: .venv/ready
	@+$(MAKE) --no-print-directory -j 2 --output-sync=target MARKED="$(MARKED)" gate lint smoke
	@$(UNCHANGED) kernels_emulated $(EMULATED) accelpatch/kernels tests/kernels/hip/simt_emulator tests/conftest.py \
		pyproject.toml -- .venv/bin/python -m pytest -q -n 2 -m "$(MARKED)" $(EMULATED)
	.venv/bin/python -m pytest -m "$(MARKED)" $(addprefix --ignore=,$(EMULATED)) $(PYTEST)

test-all: MARKED =
test-all: export ALL = true
test-all: test

# Written only when the choice has changed, so that all behind it is made anew exactly then.
.venv/torch: force
	@[ "$$(cat $@ 2>/dev/null)" = "$(TORCH)" ] || \
	  { sh scripts/setup.sh create "$(PYTHON)" "$(TORCH)" && echo "$(TORCH)" > $@; }

.venv/ready: .venv/torch pyproject.toml constraints.txt scripts/setup.sh
	@echo 'Setting up .venv (minutes, once)'
	@sh scripts/setup.sh install "$(TORCH)"
	@touch $@

.venv-oldest/ready: .venv/ready Makefile
	@echo 'Setting up .venv-oldest'
	@sh scripts/setup.sh oldest "$(OLDEST)"
	@touch $@
