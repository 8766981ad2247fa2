# Every target does all that it needs on a fresh machine with CPython >= 3.11 (with its headers) and a C compiler.
# Stamps in .venv make a second run quick; `make clean` forgets everything.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: force help dev build stress demo test test-as-user lint typecheck docs asv-site asv-history docs-alone bench-smoke test-all test-rest test-device test-debug test-asan test-extras tsan sdist-test test-other-pythons test-free-threaded test-stores test-vllm test-vllm-next test-sglang test-lmcache peers peers-vllm peers-lmcache peers-sglang release clean

VENV := .venv
comma := ,
BIN := $(VENV)/bin
JOBS ?= $(shell .ci/jobs)
JOBS := $(JOBS)
PYTEST_ARGS ?=
VLLM ?= 0.33.0
SGLANG ?= 0.5.23
PYTEST := "$(CURDIR)/$(BIN)/pytest" --numprocesses $(JOBS) --dist worksteal --durations=10 $(PYTEST_ARGS)
# What a second build (debug, sanitized, another Python) runs: slow tests and more examples find no more on it.
export ONCE := -m 'not slow' --hypothesis-profile=few --ignore-glob=tests/vllm --ignore-glob=tests/sglang --ignore-glob=tests/lmcache --ignore-glob=tests/device

# Build environments follow the constraints too: old pips read the first variable there, new ones the second. Both are lists,
# which end at a space: a URL has none.
space := $(subst ,, )
export PIP_CONSTRAINT := file://$(subst $(space),%20,$(CURDIR))/constraints.txt
export PIP_BUILD_CONSTRAINT := $(PIP_CONSTRAINT)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export KVCACHE_BUILD_JOBS ?= $(JOBS)
# The installed package is meant, never the checkout, in subprocesses too.
export PYTHONSAFEPATH := 1

SOURCES := setup.py pyproject.toml MANIFEST.in README.md $(shell find kvcache -name '*.py' -o -name '*.py[xi]' -o -name '*.pxd' -o -name '*.h')

help:
	@echo "make demo    install into .venv and run the main job"
	@echo "make test    install into .venv and run the tests that take under 2 s each: about three minutes"
	@echo "make test-all  all tests: also slow ones, all policies, more examples, a simulated device"
	@echo "make dev     .venv with the test tools, and a build in place; runs no tests"
	@echo "make build   build in place for development; after a change of one .pyx it takes seconds"
	@echo "make stress  run the attacks of tests/stress (KVCACHE_STRESS=10: ten times as long)"
	@echo "Others: lint typecheck docs asv-site asv-history docs-alone bench-smoke test-rest test-device test-debug test-asan test-extras sdist-test test-other-pythons test-free-threaded test-stores test-vllm test-vllm-next test-sglang test-lmcache peers clean"
	@echo "By hand: tsan"

# --- environments ----------------------------------------------------------------------------------------------------

# No bytecode ahead of time: most of it would never be imported.
PIP_INSTALL := $(BIN)/pip install --quiet --no-compile

$(VENV)/venv.stamp: .ci/find-python
	$$(.ci/find-python) -m venv $(VENV)
	@touch $@

# torch first and alone: the package's own open-ended requirement would take the newest, several GB of it.
$(VENV)/torch.stamp: constraints.txt $(VENV)/venv.stamp
	@echo "installing torch and the extras, and building the package (2-3 minutes) ..."
	$(PIP_INSTALL) "$$(grep ^torch== constraints.txt)"
	@touch $@

# Written again at another commit, which is part of the version.
build/commit: force
	@mkdir -p build
	@commit=$$(git rev-parse HEAD 2>/dev/null || true); [ -e $@ ] && [ "$$commit" = "$$(cat $@)" ] || echo "$$commit" >$@

build/wheel/stamp: $(SOURCES) constraints.txt build/commit | $(VENV)/venv.stamp
	@rm -rf build/wheel build/lib.* build/*.egg-info
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir build/wheel .
	@touch $@

# torch first: its rule announces both long steps.
$(VENV)/package.stamp: $(VENV)/torch.stamp build/wheel/stamp
	$(PIP_INSTALL) --no-deps --force-reinstall build/wheel/*.whl
	@touch $@

$(VENV)/extra-%.stamp: pyproject.toml $(VENV)/package.stamp
	$(PIP_INSTALL) "$$(echo build/wheel/*.whl)[$*]"
	@touch $@

# --- the two commands of the README ----------------------------------------------------------------------------------

demo: $(VENV)/extra-cli,disk,plot,transformers.stamp
	$(BIN)/kvcache demo
	$(BIN)/kvcache chat-demo --save build/chat-demo.png

test: $(VENV)/extra-test.stamp
	KVCACHE_EXPECT_IN=$(VENV) KVCACHE_MAX_TEST_CPU_S=20 $(PYTEST) --hypothesis-profile=few -m 'not slow and not other_policy'

# The same as a user has it: CI runs this in the place of `test`.
test-as-user: $(VENV)/extra-test.stamp
	.ci/test-as-user

# Everything that `make test` leaves out, and its property tests with all examples.
test-rest: $(VENV)/extra-test.stamp
	KVCACHE_EXPECT_IN=$(VENV) $(PYTEST) -m 'slow or other_policy or hypothesis'

# Transfers on a simulated accelerator, which g++ compiles.
test-device: $(VENV)/extra-test.stamp
	KVCACHE_EXPECT_IN=$(VENV) KVCACHE_SIMULATED_DEVICE=1 KVCACHE_SCHEDULES=$${KVCACHE_SCHEDULES:-10} $(PYTEST) tests/device

test-all: test test-rest test-device

# --- development -----------------------------------------------------------------------------------------------------

# In place and incremental: then `PYTHONPATH=$$PWD .venv/bin/pytest tests/...` tests what stands in the checkout.
$(VENV)/build.stamp: constraints.txt $(VENV)/torch.stamp
	$(PIP_INSTALL) $$(sed -n 's/^\(cython\|setuptools\)==/&/Ip' constraints.txt)
	@touch $@

build: $(VENV)/build.stamp
	$(BIN)/python setup.py --quiet build_ext --inplace

dev: build $(VENV)/extra-test.stamp

stress: $(VENV)/extra-test.stamp
	KVCACHE_STRESS=$${KVCACHE_STRESS:-1} $(PYTEST) tests/stress

# --- the rest of what CI runs ----------------------------------------------------------------------------------------

lint: $(VENV)/extra-lint.stamp
	$(BIN)/ruff check .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cython-lint kvcache  # it calls pycodestyle by name
	$(BIN)/hadolint examples/containers/*.Dockerfile
	$(BIN)/kubernetes-validate --strict --quiet examples/containers/kubernetes.yaml

# stubtest holds every stub against its compiled module; plain modules carry their types themselves.
typecheck: $(VENV)/extra-lint.stamp $(VENV)/extra-test.stamp
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest $$(find kvcache -name '*.pyi' | sed 's/[.]pyi$$//; s#/#.#g' | sort) --mypy-config-file pyproject.toml

# README, quickstart, how-tos and Dockerfiles with exactly the extras that they name: `test` installs all of them.
test-extras: $(VENV)/extra-test.stamp
	$(BIN)/python .ci/extras.py

docs-alone: build/wheel/stamp
	.ci/docs-alone

docs: $(VENV)/extra-docs.stamp
	@rm -rf docs/_build docs/api/generated
	$(BIN)/sphinx-build -W -n --keep-going -q -b html docs docs/_build/html

# The results that asv has gathered, as pages that need no network, beside the documentation. Without any, ten commits are
# measured first.
asv-site: $(VENV)/extra-bench.stamp .asv/results/benchmarks.json
	$(BIN)/asv publish
	PYTHONSAFEPATH= $(BIN)/python -m asv_benchmarks.site .asv/html docs/_build/html/benchmarks

.asv/results/benchmarks.json:
	$(MAKE) asv-history

# Ten of the last 100 commits, each built in an environment that asv makes: an hour on two cores.
asv-history: $(VENV)/extra-bench.stamp
	$(BIN)/asv machine --yes >/dev/null
	$(BIN)/asv run --steps $${STEPS:-10} --skip-existing-successful --bench '^(calls[.]Calls.*[(].(lru|gittins)., 10000[)]|replay[.]ReplayChats)' $${RANGE:-HEAD~100..HEAD}

# The benchmarks once, at their smaller sizes, but those that take minutes by design: worst calls and memory at a million
# blocks, and the copy rates that `kvcache bench copy` measures.
bench-smoke: $(VENV)/extra-bench.stamp
	$(BIN)/asv machine --yes >/dev/null
	$(BIN)/asv run --python=same --quick --show-stderr --bench "^(?!calls[.](WorstCall|Memory)|copies[.]Copy[.])(?!.*(00000|30000|'arc'))"

# Calls walk their tables in the debug build. So nothing that measures or bounds cost is run on it, nor what replays or simulates
# traffic to count hits. The sanitized build leaves the same out.
NOT_DEBUG := tiering/test_latency.py tiering/test_policies_over_tiers.py tiering/test_arbiter.py \
	core/test_batch_operations.py::test_reorder_of_many_calls_is_linear \
	policies/test_gittins.py::test_store_skips_bounded_blocked_groups \
	policies/test_gittins.py::test_replay_of_trace_reproduces_table policies/test_gittins.py::test_storing_only_misses_reproduces_table \
	policies/test_gittins.py::test_interleaved_parts_lose_few_hits \
	policies/test_gittins.py::test_sharing_keeps_prompts_of_sessions
test-debug: $(SOURCES) $(VENV)/extra-test.stamp
	@rm -rf build/debug
	KVCACHE_DEBUG=1 $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/debug/wheel .
	$(PIP_INSTALL) --no-deps --target build/debug/site build/debug/wheel/*.whl
	PYTHONPATH="$(CURDIR)/build/debug/site" KVCACHE_EXPECT_IN=build/debug/site KVCACHE_EXPECT_DEBUG=1 \
		$(PYTEST) $(ONCE) tests/core tests/policies tests/control tests/tiering tests/transfer $(NOT_DEBUG:%=--deselect=tests/%)

# The C parts under the compiler's sanitizers: memory errors and undefined behaviour in CI, data races by hand. Objects are kept
# between runs.
SANITIZED = KVCACHE_EXPECT_IN=build/$(1)/site PYTHONPATH="$(CURDIR)/build/$(1)/site" PYTHONMALLOC=malloc
build/%/sanitized.stamp: $(SOURCES) $(VENV)/extra-test.stamp
	@rm -rf build/$*/wheel build/$*/site build/$*/lib.*
	KVCACHE_SANITIZE=$(subst -,$(comma),$*) $(BIN)/pip wheel --quiet --no-deps --wheel-dir build/$*/wheel .
	$(PIP_INSTALL) --no-deps --target build/$*/site build/$*/wheel/*.whl
	@touch $@

# Not here: what has no C of its own (exporters, recorder), what limits the address space, of which the sanitizer takes
# terabytes, and what preloads a library of its own.
test-asan: build/address-undefined/sanitized.stamp
	$(call SANITIZED,address-undefined) LD_PRELOAD="$$($(CC) -print-file-name=libasan.so) $$($(CC) -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		$(PYTEST) $(ONCE) tests/core tests/policies tests/transfer tests/control/test_manager.py \
		tests/stress/test_copy_threads.py $(NOT_DEBUG:%=--deselect=tests/%) \
		-k 'not submit_without_threads and not wait_without_thread_copies and not wall_clock_steps'

tsan: build/thread/sanitized.stamp
	$(call SANITIZED,thread) KVCACHE_STRESS=$${KVCACHE_STRESS:-5} LD_PRELOAD="$$($(CC) -print-file-name=libtsan.so)" \
		TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1 $(BIN)/pytest tests/stress/test_copy_threads.py -k copies

# The files that a release publishes, checked, in dist/.
release:
	.ci/release

sdist-test: build/wheel/stamp
	.ci/sdist-test

test-other-pythons:
	.ci/test-other-pythons

test-free-threaded:
	.ci/test-free-threaded

# Mooncake's tier against its real servers; a missing client is a failure here. (Valkey's tests are in `test` and `test-rest`.)
test-stores: $(VENV)/extra-test.stamp $(VENV)/extra-mooncake.stamp
	KVCACHE_EXPECT_IN=$(VENV) KVCACHE_EXPECT_STORES=1 $(PYTEST) tests/tiers/test_mooncake.py tests/tiers/test_stores.py tests/tiers/test_store_faults.py -k mooncake

test-vllm: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" tests/vllm/run $(PYTEST_ARGS)

# The next release of vLLM, over the compiled parts of the one before. These tests boot several engines each, and take minutes:
# `VLLM_RELEASE=0.33.0 make test-vllm` runs them, too. `make test-vllm-next VLLM=0.34.0` shows what another release breaks.
NOT_NEXT := test_engine_tiers.py test_kills.py test_node.py test_processes.py test_recorder.py test_weights.py
test-vllm-next: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" VLLM_RELEASE=$(VLLM) tests/vllm/run $(NOT_NEXT:%=--ignore=tests/vllm/%) $(PYTEST_ARGS)

test-sglang: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" tests/sglang/run $(PYTEST_ARGS)

test-lmcache: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" tests/lmcache/run $(PYTEST_ARGS)

# The engines' own tests with ours in the place of their parts, each after its engine's stage, whose environment it uses. CI runs
# one release of each; `make -k peers VLLM=0.34.0 SGLANG=0.5.24` shows what other releases break.
peers: peers-vllm peers-lmcache peers-sglang

peers-vllm: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" VLLM_RELEASE=$(VLLM) tests/vllm/run peers $(PYTEST_ARGS)

peers-lmcache: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" tests/lmcache/run peers $(PYTEST_ARGS)

peers-sglang: build/wheel/stamp
	KVCACHE_WHEEL="$$(echo build/wheel/*.whl)" SGLANG_RELEASE=$(SGLANG) tests/sglang/run peers $(PYTEST_ARGS)

clean:
	@rm -rf build dist .venv .venv-* *.egg-info docs/_build docs/api/generated .mypy_cache .ruff_cache .pytest_cache .hypothesis
